// Control frames come out of the codec as they went in, and malformed ones do not come out.

#include "messaging/control_frames.h"

#include <gtest/gtest.h>

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

TEST(ControlFramesTest, OtherKindsAreNotControlFrames) {
  wire::Header header;
  for (const Kind kind : {Kind::kRequest, Kind::kResponse, Kind::kPing, Kind::kJoin}) {
    header.kind = kind;
    EXPECT_FALSE(decodeControl(header, {}).has_value());
  }
}

} // namespace
} // namespace torch_ucx_rpc
