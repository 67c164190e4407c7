// The order in which events reach their handlers: requests before failures, answers before ends, one batch after the
// other.

#include "messaging/event_buffer.h"

#include "event_log.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Notes = std::vector<std::string>;
const Driver kLeading{Role::kLeader, std::nullopt};

std::unique_ptr<Peer> makePeer(Rank rank) {
  Member member;
  member.rank = rank;
  member.session = 100 + static_cast<uint64_t>(rank);
  return std::make_unique<Peer>(member);
}

class EventBufferTest : public testing::Test {
 protected:
  IncomingMessage message(wire::Kind kind, uint64_t callId) const {
    IncomingMessage made;
    made.from = peer_.get();
    made.header.kind = kind;
    made.header.callId = callId;
    return made;
  }
  void addRequest(uint64_t callId) {
    events_.buffer.addMessage(message(wire::Kind::kRequest, callId));
  }
  void addAnswer(uint64_t callId) {
    events_.buffer.addMessage(message(wire::Kind::kResponse, callId));
  }
  void addSent(wire::Kind kind, uint64_t callId, Error error = {}) {
    auto message = std::make_unique<OutgoingMessage>();
    message->to = peer_.get();
    message->header.kind = kind;
    message->header.callId = callId;
    message->error = std::move(error);
    events_.buffer.addSent(std::move(message));
  }

  const std::unique_ptr<Peer> peer_ = makePeer(3);
  EventLog events_;
};

TEST_F(EventBufferTest, WithoutEventsThereIsNoBatch) {
  EXPECT_TRUE(events_.buffer.isEmpty());
  EXPECT_EQ(events_.buffer.take(), nullptr);
  addRequest(1);
  EXPECT_FALSE(events_.buffer.isEmpty());
  EXPECT_EQ(events_.take(), Notes{"request 1"});
  EXPECT_TRUE(events_.buffer.isEmpty());
}

TEST_F(EventBufferTest, AnswersComeFirstAndFailuresLast) {
  events_.buffer.addFailure(*peer_, {ErrorCode::kPeerFailed, "dead"});
  addRequest(1);
  addAnswer(2);
  events_.buffer.addControl(*peer_, {wire::Kind::kGoodbye});
  addRequest(3);
  EXPECT_EQ(events_.take(), (Notes{"answer 2", "request 1", "goodbye 3", "request 3", "failure: dead 3"}))
      << "what a peer sent before its end counts";
}

TEST_F(EventBufferTest, RequestsAndControlFramesKeepTheOrderOfArrival) {
  for (uint64_t call = 0; call < 50; call += 2) {
    addRequest(call);
    events_.buffer.addControl(*peer_, barrierArrive(call + 1, {}));
  }
  const Notes notes = events_.take();
  ASSERT_EQ(notes.size(), 50u);
  for (uint64_t call = 0; call < 50; ++call) {
    EXPECT_EQ(notes[call], (call % 2 == 0 ? "request " : "arrive ") + std::to_string(call));
  }
}

TEST_F(EventBufferTest, BatchesAreHandedOutInTheOrderInWhichTheyWereTaken) {
  addRequest(1);
  const std::unique_ptr<EventBatch> first = events_.buffer.take();
  addRequest(2);
  events_.buffer.addFailure(*peer_, {ErrorCode::kPeerFailed, "dead"});
  addAnswer(3);
  const std::unique_ptr<EventBatch> second = events_.buffer.take();
  second->dispatch({});
  EXPECT_EQ(events_.handlers.takeNotes(), Notes{"answer 3"}) << "answers do not wait for other batches";
  first->dispatch({});
  EXPECT_EQ(events_.handlers.takeNotes(), (Notes{"request 1", "request 2", "failure: dead 3"}));
}

TEST_F(EventBufferTest, DroppedBatchKeepsNoCallerWaiting) {
  addRequest(1);
  std::unique_ptr<EventBatch> dropped = events_.buffer.take();
  addRequest(2);
  const std::unique_ptr<EventBatch> next = events_.buffer.take();
  next->dispatch({});
  EXPECT_EQ(events_.handlers.takeNotes(), Notes{});
  dropped.reset();
  EXPECT_EQ(events_.handlers.takeNotes(), Notes{"request 2"});
}

TEST_F(EventBufferTest, DriverRunsShortRequestsItselfAfterTheOthers) {
  events_.handlers.shortRequest = 1;
  addRequest(1);
  addRequest(2);
  EXPECT_EQ(events_.take(kLeading), (Notes{"request 2", "request on the driver 1"}));
  addRequest(1);
  EXPECT_EQ(events_.take(), Notes{"request 1"}) << "a thread that drives nothing may hold locks";
}

TEST_F(EventBufferTest, WaitingCallerDoesWorkItselfUnlessSomethingWaitsBehindIt) {
  events_.life = std::make_shared<int>();
  events_.handlers.shortRequest = 1;
  Notes done;
  const auto work = [&](const char* note) { events_.buffer.addWork([&done, note] { done.emplace_back(note); }); };
  work("first");
  work("last");
  EXPECT_EQ(events_.take(Driver{Role::kWaitingCaller, 1}), Notes{});
  EXPECT_EQ(done, Notes{"last"});
  work("of a leader, without whom nothing arrives");
  EXPECT_EQ(events_.take(kLeading), Notes{});
  work("before a request");
  addRequest(1);
  EXPECT_EQ(events_.take(Driver{Role::kWaitingCaller, 2}), Notes{"request on the driver 1"});
  work("before the end of a wait");
  addAnswer(1);
  EXPECT_EQ(events_.take(Driver{Role::kWaitingCaller, 1}), (Notes{"answer 1", "completed by the driver 1"}));
  work("of a thread that may hold locks");
  EXPECT_EQ(events_.take(), Notes{});
  EXPECT_EQ(done, Notes{"last"}) << "the rest is left to other threads";
}

TEST_F(EventBufferTest, DriverCompletesTheCallThatItWaitsForLast) {
  addAnswer(1);
  addAnswer(2);
  addRequest(3);
  EXPECT_EQ(
      events_.take(Driver{Role::kWaitingCaller, 1}),
      (Notes{"answer 1", "answer 2", "request 3", "completed by the driver 1"}));
}

TEST_F(EventBufferTest, FailedSendsReachTheirHandlers) {
  const Error broken(ErrorCode::kPeerFailed, "broken");
  addSent(wire::Kind::kRequest, 1);
  addSent(wire::Kind::kRequest, 2, broken);
  addSent(wire::Kind::kResponse, 3, broken);
  addSent(wire::Kind::kRefused, 4, broken);
  addSent(wire::Kind::kPing, 0, broken);
  EXPECT_EQ(
      events_.take(),
      (Notes{
          "request not sent: broken 2",
          "answer not sent: broken 3",
          "control not sent: broken 3", // a refusal is not refused in turn
          "control not sent: broken 3"}));
}

TEST_F(EventBufferTest, RejectionsReachTheirHandlers) {
  const Error why(ErrorCode::kOutOfMemory, "too large");
  events_.buffer.addRejection(*peer_, message(wire::Kind::kRequest, 1).header, why);
  events_.buffer.addRejection(*peer_, message(wire::Kind::kResponse, 2).header, why);
  EXPECT_EQ(events_.take(), (Notes{"request rejected: too large 1", "answer rejected: too large 2"}));
}

TEST_F(EventBufferTest, EveryControlFrameHasItsHandler) {
  events_.buffer.addControl(*peer_, {wire::Kind::kLeave});
  events_.buffer.addControl(*peer_, {wire::Kind::kAcknowledge});
  events_.buffer.addControl(*peer_, barrierRelease(7, {}));
  events_.buffer.addControl(*peer_, refused(8, {ErrorCode::kOutOfThreads, "no thread"}));
  events_.buffer.addJoin(9, {});
  EXPECT_EQ(events_.take(), (Notes{"join 9", "leave 3", "acknowledge 3", "release 7", "refused: no thread 8"}));
}

// A message whose memory may hold Python objects.
class Lent final : public Lender {
 public:
  explicit Lent(bool& isDestroyed) : isDestroyed_(isDestroyed) {}
  ~Lent() override {
    isDestroyed_ = true;
  }
  bool mayRunUserCode() const override {
    return true;
  }

 private:
  bool& isDestroyed_;
};

TEST_F(EventBufferTest, SentMemoryIsGivenBackWithTheBatchAtTheLatest) {
  bool isDestroyed = false;
  auto message = std::make_unique<OutgoingMessage>();
  message->to = peer_.get();
  message->lender = std::make_unique<Lent>(isDestroyed);
  events_.buffer.addSent(std::move(message));
  (void)events_.take(Driver{Role::kWaitingCaller, 1});
  EXPECT_TRUE(isDestroyed);
}

} // namespace
} // namespace torch_ucx_rpc
