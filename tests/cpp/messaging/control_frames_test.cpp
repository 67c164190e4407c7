// The codec returns control frames as they went in, and refuses malformed ones.

#include "messaging/control_frames.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <variant>

namespace torch_ucx_rpc {
namespace {

using wire::Kind;

wire::Header headerOf(const EncodedControl& encoded) {
  wire::Header header;
  header.kind = encoded.kind;
  header.callId = encoded.callId;
  return header;
}

template <typename Frame>
Frame throughTheWire(const Frame& frame) {
  const EncodedControl encoded = encodeControl(frame);
  const std::optional<ControlFrame> decoded = decodeControl(headerOf(encoded), encoded.body);
  return std::get<Frame>(decoded.value());
}

TEST(ControlFramesTest, FramesWithoutABodyKeepTheirKind) {
  throughTheWire(Goodbye{});
  throughTheWire(Leave{});
  throughTheWire(Acknowledge{});
  EXPECT_EQ(encodeControl(Goodbye{}).kind, Kind::kGoodbye);
  EXPECT_EQ(encodeControl(Leave{}).body.size(), 0u);
}

TEST(ControlFramesTest, BarriersKeepRoundNumberAndError) {
  const Barrier::Arrivals arrivals{{{0, -3}, {1, -3}, {2, 5}, {4, 5}, {32766, 0}}, {3, 5, 6}};
  const BarrierArrive arrive = throughTheWire(BarrierArrive{7, arrivals});
  EXPECT_EQ(arrive.round, 7u);
  EXPECT_EQ(arrive.arrivals.values, arrivals.values);
  EXPECT_EQ(arrive.arrivals.gone, arrivals.gone);
  const BarrierRelease released = throughTheWire(BarrierRelease{8, {5, {}}});
  EXPECT_EQ(released.round, 8u);
  EXPECT_EQ(released.result.sum, 5);
  EXPECT_FALSE(released.result.lost);
  const BarrierRelease failed = throughTheWire(BarrierRelease{9, {0, {ErrorCode::kPeerFailed, "one died"}}});
  EXPECT_EQ(failed.result.lost.code(), ErrorCode::kPeerFailed);
  EXPECT_EQ(failed.result.lost.message(), "one died");
}

TEST(ControlFramesTest, RefusalsKeepTheReasonsThatCallersTellApart) {
  for (const ErrorCode code : {ErrorCode::kProtocol, ErrorCode::kOutOfMemory, ErrorCode::kOutOfThreads}) {
    EXPECT_EQ(throughTheWire(Refused{4, {code, "no"}}).why.code(), code);
  }
  const Refused refused = throughTheWire(Refused{4, {ErrorCode::kDeviceFailed, "no"}});
  EXPECT_EQ(refused.callId, 4u);
  EXPECT_EQ(refused.why.code(), ErrorCode::kInternal);
  EXPECT_EQ(refused.why.message(), "no");
}

TEST(ControlFramesTest, FramesThatAreTooShortAreDropped) {
  wire::Header header;
  for (const Kind kind : {Kind::kRefused, Kind::kBarrierArrive, Kind::kBarrierRelease}) {
    header.kind = kind;
    EXPECT_FALSE(decodeControl(header, Bytes(3)).has_value());
  }
  header.kind = Kind::kBarrierArrive;
  EXPECT_FALSE(decodeControl(header, Bytes(sizeof(wire::BarrierRun) + 1)).has_value()) << "a sentence is not part";
}

TEST(ControlFramesTest, RanksThatNoWorkerCanHaveAreDropped) {
  wire::Header header;
  header.kind = Kind::kBarrierArrive;
  for (const wire::BarrierRun& run : {wire::BarrierRun{-1, 1, 0, 0}, wire::BarrierRun{32767, 1, 0, 0}}) {
    EXPECT_FALSE(decodeControl(header, Bytes(std::as_bytes(std::span(&run, 1)))).has_value());
  }
}

TEST(ControlFramesTest, ArrivalsOfALargeJobTakeFewBytes) {
  Barrier::Arrivals all;
  for (Rank rank = 0; rank < 10'000; ++rank) {
    all.values[rank] = rank == 4711 ? 1 : 0;
  }
  EXPECT_EQ(encodeControl(BarrierArrive{1, all}).body.size(), 3 * sizeof(wire::BarrierRun));
}

TEST(ControlFramesTest, AcknowledgementsKeepTheRunsOfMissingNumbers) {
  wire::ReplayWindow received(1);
  for (const uint64_t number : {1, 2, 5, 6, 9}) {
    ASSERT_TRUE(received.accept(number));
  }
  const Bytes body = encodeReceived(received, true);
  const std::optional<ReceivedFrames> decoded = decodeReceived(body);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->next, 10u);
  EXPECT_EQ(decoded->missing, (std::map<uint64_t, uint64_t>{{3, 5}, {7, 9}}));
  EXPECT_TRUE(decoded->mustSendAgain);
  const std::span<const std::byte> bytes = body;
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decodeReceived(bytes.first(size)).has_value()) << size;
  }
}

TEST(ControlFramesTest, AcknowledgementsLeaveOutMostOfVeryManyRuns) {
  wire::ReplayWindow received(1);
  for (uint64_t number = 2; number <= 4 * wire::kMaxRuns; number += 2) {
    ASSERT_TRUE(received.accept(number));
  }
  const std::optional<ReceivedFrames> decoded = decodeReceived(encodeReceived(received, false));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->missing.size(), wire::kMaxRuns);
  EXPECT_EQ(decoded->next, 2 * wire::kMaxRuns + 1) << "what is beyond counts as missing";
}

TEST(ControlFramesTest, OtherKindsAreNotControlFrames) {
  wire::Header header;
  for (const Kind kind : {Kind::kRequest, Kind::kResponse, Kind::kPing, Kind::kJoin}) {
    header.kind = kind;
    EXPECT_FALSE(decodeControl(header, {}).has_value());
  }
}

} // namespace
} // namespace torch_ucx_rpc
