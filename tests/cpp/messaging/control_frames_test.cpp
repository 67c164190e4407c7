// Control frames reach their handlers unchanged. Malformed frames reach no handler.

#include "messaging/control_frames.h"

#include "handlers.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Notes = std::vector<std::string>;
using wire::Kind;

// Keeps what the handlers get of a frame.
class Heard final : public Handlers {
 public:
  explicit Heard(const ControlFrame& frame) {
    Peer from(Member{});
    dispatchControl(all, from, frame);
    notes = takeNotes();
  }
  void onRefused(Peer& by, uint64_t callId, const Error& why) override {
    Handlers::onRefused(by, callId, why);
    error = why;
  }
  void onBarrierArrive(Peer& from, uint64_t round, const Barrier::Arrivals& heard) override {
    Handlers::onBarrierArrive(from, round, heard);
    arrivals = heard;
  }
  void onBarrierRelease(Peer& from, uint64_t round, const Barrier::Result& heard) override {
    Handlers::onBarrierRelease(from, round, heard);
    result = heard;
  }

  Notes notes;
  Error error;
  Barrier::Arrivals arrivals;
  Barrier::Result result;
};

TEST(ControlFramesTest, FramesWithoutABodyReachTheirHandlers) {
  EXPECT_EQ(Heard({Kind::kGoodbye}).notes, Notes{"goodbye 0"});
  EXPECT_EQ(Heard(goodbyeToLost()).notes, Notes{"failure: it has lost this worker, which was silent 0"});
  EXPECT_EQ(Heard({Kind::kLeave}).notes, Notes{"leave 0"});
  EXPECT_EQ(Heard({Kind::kAcknowledge}).notes, Notes{"acknowledge 0"});
  EXPECT_EQ(Heard({Kind::kTaken, 70}).notes, Notes{"taken 70"});
}

TEST(ControlFramesTest, BarriersKeepRoundNumberAndError) {
  const Barrier::Arrivals arrivals{{{0, -3}, {1, -3}, {2, 5}, {4, 5}, {32766, 0}}, {3, 5, 6}};
  const Heard arrive(barrierArrive(7, arrivals));
  EXPECT_EQ(arrive.notes, Notes{"arrive 7"});
  EXPECT_EQ(arrive.arrivals.values, arrivals.values);
  EXPECT_EQ(arrive.arrivals.gone, arrivals.gone);
  const Heard released(barrierRelease(8, {5, {}}));
  EXPECT_EQ(released.notes, Notes{"release 8"});
  EXPECT_EQ(released.result.sum, 5);
  EXPECT_FALSE(released.result.lost);
  const Heard failed(barrierRelease(9, {0, {ErrorCode::kPeerFailed, "one died"}}));
  EXPECT_EQ(failed.result.lost.code(), ErrorCode::kPeerFailed);
  EXPECT_EQ(failed.result.lost.message(), "one died");
}

TEST(ControlFramesTest, RefusalsKeepTheReasonsThatCallersTellApart) {
  for (const ErrorCode code : {ErrorCode::kProtocol, ErrorCode::kOutOfMemory, ErrorCode::kOutOfThreads}) {
    EXPECT_EQ(Heard(refused(4, {code, "no"})).error.code(), code);
  }
  const Heard other(refused(4, {ErrorCode::kDeviceFailed, "no"}));
  EXPECT_EQ(other.notes, Notes{"refused: no 4"});
  EXPECT_EQ(other.error.code(), ErrorCode::kInternal);
  EXPECT_EQ(Heard(putRefused("layers", 5)).notes, Notes{"put refused in layers 5"});
}

TEST(ControlFramesTest, FramesThatAreTooShortAreDropped) {
  for (const Kind kind : {Kind::kRefused, Kind::kBarrierArrive, Kind::kBarrierRelease}) {
    EXPECT_EQ(Heard({kind, 1, Bytes(3)}).notes, Notes{});
  }
  const ControlFrame withSentence{Kind::kBarrierArrive, 1, Bytes(sizeof(wire::BarrierRun) + 1)};
  EXPECT_EQ(Heard(withSentence).notes, Notes{}) << "part of a text is refused";
}

TEST(ControlFramesTest, RanksThatNoWorkerCanHaveAreDropped) {
  for (const wire::BarrierRun& run : {wire::BarrierRun{-1, 1, 0, 0}, wire::BarrierRun{32767, 1, 0, 0}}) {
    EXPECT_EQ(Heard({Kind::kBarrierArrive, 1, Bytes(std::as_bytes(std::span(&run, 1)))}).notes, Notes{});
  }
}

TEST(ControlFramesTest, ArrivalsOfALargeJobTakeFewBytes) {
  Barrier::Arrivals all;
  for (Rank rank = 0; rank < 10'000; ++rank) {
    all.values[rank] = rank == 4711 ? 1 : 0;
  }
  EXPECT_EQ(barrierArrive(1, all).body.size(), 3 * sizeof(wire::BarrierRun));
}

TEST(ControlFramesTest, AcknowledgementsKeepTheRunsOfMissingNumbers) {
  wire::ReplayWindow received(1);
  for (const uint64_t number : {1, 2, 5, 6, 9}) {
    ASSERT_TRUE(received.accept(number));
  }
  const Bytes body = encodeReceived(received, true);
  const std::optional<ReceivedFrames> decoded = decodeReceived(body);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->frames.next(), 10u);
  EXPECT_EQ(decoded->frames.missing(), (std::map<uint64_t, uint64_t>{{3, 5}, {7, 9}}));
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
  EXPECT_EQ(decoded->frames.missing().size(), wire::kMaxRuns);
  EXPECT_EQ(decoded->frames.next(), 2 * wire::kMaxRuns + 1) << "what is beyond counts as missing";
}

TEST(ControlFramesTest, OtherKindsHaveNoHandler) {
  for (const Kind kind : {Kind::kRequest, Kind::kResponse, Kind::kPing, Kind::kJoin}) {
    EXPECT_EQ(Heard({kind}).notes, Notes{});
  }
}

} // namespace
} // namespace torch_ucx_rpc
