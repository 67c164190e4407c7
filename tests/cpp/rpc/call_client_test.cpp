// Calls of one worker; the test is the callee. Every future is completed once, and a failure has its reason.

#include "rpc/call_client.h"

#include "call_client_fixture.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Kind = RpcFailure::Kind;

// ------------------------------------------------------------------------------------------------------------ answers

TEST_F(CallClientTest, AnswerCompletesTheFutureOnAnAgentThread) {
  const Future future = call();
  std::promise<std::thread::id> completedOn;
  future->addCallback([&](JitFuture&) { completedOn.set_value(std::this_thread::get_id()); });
  EXPECT_EQ(calls_.open(), 1u);
  EXPECT_EQ(calls_.opened(), 1u);
  const uint64_t id = arrivedCall();
  EXPECT_TRUE(calls_.isAwaited(one_.peer(1), id));
  EXPECT_FALSE(calls_.isAwaited(one_.peer(2), id)) << "another worker was not asked";
  answerWith(id, "answer");
  EXPECT_EQ(textOf(*answer(future)), "answer");
  // The future wakes its waiters before it runs callbacks, so wait for the callback.
  EXPECT_NE(completedOn.get_future().get(), std::this_thread::get_id())
      << "a thread that only submits may hold locks of torch's";
  EXPECT_FALSE(calls_.isAwaited(one_.peer(1), id));
  EXPECT_EQ(calls_.open(), 0u);
  EXPECT_EQ(calls_.opened(), 1u);
  EXPECT_EQ(one_.peer(1).callsSent.load(), 1u);
  EXPECT_EQ(one_.peer(1).callsFailed.load(), 0u);
}

TEST_F(CallClientTest, CallToOneselfIsAnsweredWithoutTheTransport) {
  const Future future = call("self", milliseconds(0), MessageType::PYTHON_CALL, 0);
  ASSERT_EQ(others_.takeNotes().size(), 1u);
  Peer& self = one_.peer(0);
  one_.messenger.post(
      self,
      wire::Kind::kResponse,
      others_.requests[0].header.callId,
      encodeMessage(makeMessage(MessageType::PYTHON_RET, "own answer"), self, {}, &one_.messenger.transport()));
  EXPECT_EQ(textOf(*answer(future)), "own answer");
}

TEST_F(CallClientTest, CalleesExceptionFailsTheCallWithItsOwnText) {
  const Future future = call();
  const uint64_t id = arrivedCall();
  answerWith(id, rpc::createExceptionResponse("ValueError: boom", static_cast<int64_t>(id)));
  EXPECT_EQ(failure(future), "ValueError: boom");
  EXPECT_THROW(std::rethrow_exception(future->exception_ptr()), std::runtime_error);
  EXPECT_EQ(one_.peer(1).callsFailed.load(), 1u);
}

TEST_F(CallClientTest, AnswerThatCannotBeReadFailsItsCall) {
  const Future future = call();
  two_.messenger.post(two_.peer(0), wire::Kind::kResponse, arrivedCall(), makeOutgoing(3));
  one_.takeIn();
  const auto failed = rpcFailure(future);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kMessageRefused);
  EXPECT_EQ(failed->details().name, "w1");
  EXPECT_TRUE(contains(failed->what(), "the answer of worker 'w1'") && contains(failed->what(), "is unreadable"))
      << failed->what();
}

TEST_F(CallClientTest, LateAnswersAndAnswersOfOtherWorkersAreDropped) {
  const Future future = call();
  const uint64_t id = arrivedCall();
  three_.messenger.post(
      three_.peer(0),
      wire::Kind::kResponse,
      id,
      encodeMessage(makeMessage(MessageType::PYTHON_RET, "false"), three_.peer(0), {}, &three_.messenger.transport()));
  one_.takeIn();
  EXPECT_EQ(calls_.open(), 1u);
  answerWith(id, "true");
  EXPECT_EQ(textOf(*answer(future)), "true");
  answerWith(id, "again");
  EXPECT_EQ(textOf(*answer(future)), "true");
}

TEST_F(CallClientTest, EagerBytesAreGivenBackWithTheCall) {
  const Future future = call(std::string(10'000, 'x'));
  EXPECT_GE(one_.peer(1).eagerBytesOpen.load(), 10'000u);
  answerWith(arrivedCall(), "answer");
  (void)answer(future);
  EXPECT_TRUE(eventually([&] { return one_.peer(1).eagerBytesOpen.load() == 0; }));
}

// ---------------------------------------------------------------------------------------------------------- deadlines

TEST_F(CallClientTest, CallFailsWithItsDeadlineAndNotBefore) {
  const Future future = call("call", milliseconds(500));
  (void)arrivedCall();
  one_.advance(milliseconds(499)); // 499 ms after the test began
  EXPECT_EQ(calls_.open(), 1u);
  one_.now.store(Timer::Clock::now() + milliseconds(501)); // the call was made before now
  one_.advance(milliseconds(0));
  const auto failed = rpcFailure(future);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kTimedOut);
  EXPECT_EQ(failed->details().name, "w1");
  EXPECT_EQ(failed->details().rank, 1);
  EXPECT_EQ(failed->details().host, "host1");
  EXPECT_EQ(failed->details().timeout, milliseconds(500));
  EXPECT_TRUE(contains(failed->what(), "500") && contains(failed->what(), "called worker 'w1'")) << failed->what();
  EXPECT_EQ(calls_.timedOut(), 1u);
  EXPECT_EQ(calls_.open(), 0u);
  EXPECT_EQ(one_.peer(1).callsFailed.load(), 1u);
}

TEST_F(CallClientTest, EachCallHasADeadlineOfItsOwn) {
  const Future late = call("late", std::chrono::hours(50));
  const Future none = call("none");
  const Future early = call("early", std::chrono::hours(5));
  one_.advance(std::chrono::hours(6));
  EXPECT_EQ(rpcFailure(early)->kind(), Kind::kTimedOut);
  EXPECT_EQ(calls_.open(), 2u);
  one_.advance(std::chrono::hours(50));
  EXPECT_EQ(rpcFailure(late)->kind(), Kind::kTimedOut);
  one_.advance(std::chrono::hours(10'000));
  EXPECT_EQ(calls_.open(), 1u) << "a timeout of 0 means none";
  EXPECT_FALSE(none->completed());
  EXPECT_EQ(calls_.timedOut(), 2u);
}

// A job with a secret seals a large request before it is posted.
class SealedCallClientTest : public CallClientTest {
 protected:
  SealedCallClientTest() : CallClientTest(withKeys(membersOf(3))) {}

 private:
  static std::vector<Member> withKeys(std::vector<Member> members) {
    for (Member& member : members) {
      member.sendKey = member.receiveKey = "key of all";
    }
    return members;
  }
};

TEST_F(SealedCallClientTest, RequestWhoseTimeRanOutBeforeItWasPostedIsTakenBack) {
  std::thread timer([this] {
    EXPECT_TRUE(eventually([this] {
      one_.advance(std::chrono::hours(1));
      return calls_.timedOut() == 1;
    }));
  });
  const Future future = call(std::string(64 << 20, 'x'), milliseconds(1));
  timer.join();
  EXPECT_EQ(rpcFailure(future)->kind(), Kind::kTimedOut);
  exchange(one_, two_);
  EXPECT_TRUE(callee_.requests.empty());
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(CallClientTest, AbandonedRequestIsNotTakenInUnlessItMustRun) {
  const std::string large(OutgoingMessage::kEagerBodyBytes + 1, 'x');
  const Future call1 = call(large, milliseconds(1));
  const Future call2 = call(large, milliseconds(1), MessageType::PYTHON_REMOTE_CALL);
  one_.advance(std::chrono::hours(1));
  EXPECT_EQ(rpcFailure(call1)->kind(), Kind::kTimedOut);
  EXPECT_EQ(rpcFailure(call2)->kind(), Kind::kTimedOut);
  exchange(one_, two_);
  ASSERT_EQ(callee_.requests.size(), 1u) << "others count on the value of rpc.remote()";
  EXPECT_EQ(callee_.requests[0].header.callId, 1u);
}

// ----------------------------------------------------------------------------------------------------------- failures

TEST_F(CallClientTest, CallsToAPeerThatIsLostFailAndOthersDoNot) {
  const Future lost = call();
  const Future other = call("other", milliseconds(0), MessageType::PYTHON_CALL, 2);
  endCallee(Peer::State::kFailed, ErrorCode::kPeerFailed, "its process has ended");
  const auto failed = rpcFailure(lost);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kWorkerLost);
  EXPECT_EQ(failed->details().name, "w1");
  EXPECT_EQ(failed->details().cause, "its process has ended");
  EXPECT_FALSE(other->completed());
  EXPECT_EQ(calls_.open(), 1u);
  const auto later = rpcFailure(call());
  ASSERT_TRUE(later);
  EXPECT_EQ(later->kind(), Kind::kWorkerLost) << "a new call is not sent either";
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(CallClientTest, CallsToAPeerThatLeavesOrHasLeftFailWithThatReason) {
  ASSERT_TRUE(one_.peer(1).moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, "it is leaving the group"}));
  const auto leaving = rpcFailure(call());
  ASSERT_TRUE(leaving);
  EXPECT_EQ(leaving->kind(), Kind::kWorkerLeft);
  EXPECT_TRUE(contains(leaving->what(), "is leaving the group")) << leaving->what();
  endCallee(Peer::State::kLeft, ErrorCode::kShutDown, "it has shut down its RPC agent");
  const auto left = rpcFailure(call());
  ASSERT_TRUE(left);
  EXPECT_EQ(left->kind(), Kind::kWorkerLeft);
  EXPECT_TRUE(contains(left->what(), "has shut down")) << left->what();
}

TEST_F(CallClientTest, NoticesToAPeerThatIsGoneCountAsReceived) {
  const Future before = call("", milliseconds(0), MessageType::RREF_USER_DELETE);
  endCallee(Peer::State::kFailed, ErrorCode::kPeerFailed, "it died");
  EXPECT_EQ(answer(before)->type(), MessageType::RREF_ACK) << "torch would send it again for ever";
  EXPECT_EQ(answer(call("", milliseconds(0), MessageType::RREF_CHILD_ACCEPT))->type(), MessageType::RREF_ACK);
}

TEST_F(CallClientTest, RequestThatDidNotLeaveFailsItsCall) {
  network_.setFault([](const wire::Header&, SendMode) { return LoopbackNetwork::Fate::kFail; });
  const auto failed = rpcFailure(call());
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kNotSent);
  EXPECT_EQ(failed->details().cause, "loopback: the send was made to fail");
  EXPECT_TRUE(contains(failed->what(), "could not send to worker 'w1'")) << failed->what();
}

TEST_F(CallClientTest, RefusalFailsTheCallWithItsReason) {
  const struct {
    ErrorCode code;
    Kind kind;
    const char* resource;
  } refusals[] = {
      {ErrorCode::kProtocol, Kind::kMessageRefused, ""},
      {ErrorCode::kOutOfMemory, Kind::kOutOfResources, "memory"},
      {ErrorCode::kOutOfThreads, Kind::kOutOfResources, "threads"},
      {ErrorCode::kOutOfFiles, Kind::kOutOfResources, "files"},
      {ErrorCode::kInternal, Kind::kNotSent, ""},
  };
  uint64_t id = 0;
  for (const auto& refusal : refusals) {
    const Future future = call();
    calls_.onRefused(one_.peer(2), id, {refusal.code, "not mine to refuse"});
    EXPECT_EQ(calls_.open(), 1u);
    calls_.onRefused(one_.peer(1), id++, {refusal.code, "the callee's words"});
    const auto failed = rpcFailure(future);
    ASSERT_TRUE(failed);
    EXPECT_EQ(failed->kind(), refusal.kind);
    EXPECT_EQ(failed->details().resource, refusal.resource);
    EXPECT_STREQ(failed->what(), "the callee's words");
  }
}

TEST_F(CallClientTest, AnswerThatCannotBeTakenInFailsItsCall) {
  const Future future = call();
  calls_.onAnswerRejected(one_.peer(1), arrivedCall(), outOfMemoryFor(7));
  const auto failed = rpcFailure(future);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kOutOfResources);
  EXPECT_EQ(failed->details().resource, "memory");
  EXPECT_TRUE(contains(failed->what(), "could not receive the answer of worker 'w1'")) << failed->what();
}

// ---------------------------------------------------------------------------------------------------------------- end

TEST_F(CallClientTest, ShutDownFailsAllOpenCalls) {
  const Future first = call();
  const Future second = call("call", milliseconds(0), MessageType::PYTHON_CALL, 2);
  calls_.shutDown();
  EXPECT_TRUE(first->completed() && second->completed()) << "at once: no thread may be left for it";
  const auto failed = rpcFailure(second);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kShutDown);
  EXPECT_EQ(failed->details().name, "w2");
  EXPECT_TRUE(contains(failed->what(), "RPC was shut down on worker 'w0' before worker 'w2'")) << failed->what();
  EXPECT_EQ(calls_.open(), 0u);
}

TEST_F(CallClientTest, NothingIsSentAfterTheEnd) {
  one_.lifetime.close();
  const auto failed = rpcFailure(call());
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kShutDown);
  EXPECT_EQ(arrivedCall(), ~0ull);
}

TEST_F(CallClientTest, DyingAgentReportsFailuresAtOnceAndDropsAnswers) {
  const Future answered = call();
  const uint64_t id = arrivedCall();
  const Future lost = call("call", milliseconds(0), MessageType::PYTHON_CALL, 2);
  endLifetime();
  answerWith(id, "answer");
  EXPECT_FALSE(answered->completed()) << "shutDown() ends it";
  ASSERT_TRUE(one_.peer(2).moveTo(Peer::State::kFailed, one_.peer(2).lost({ErrorCode::kPeerFailed, "it died"})));
  calls_.onPeerGone(one_.peer(2));
  EXPECT_TRUE(lost->completed()) << "nothing may be queued any more";
}

// ------------------------------------------------------------------------------------------------------------ waiting

TEST_F(CallClientTest, CallerThatWaitsDrivesAndCompletesItsOwnCall) {
  const Future future = call();
  std::thread::id completedOn;
  future->addCallback([&](JitFuture&) { completedOn = std::this_thread::get_id(); });
  const uint64_t id = arrivedCall();
  Peer& caller = two_.peer(0);
  two_.messenger.post(
      caller,
      wire::Kind::kResponse,
      id,
      encodeMessage(makeMessage(MessageType::PYTHON_RET, "answer"), caller, {}, &two_.messenger.transport()));
  calls_.waitDriving(*future); // this thread takes in the frame
  EXPECT_EQ(completedOn, std::this_thread::get_id());
  EXPECT_EQ(textOf(*answer(future)), "answer");
}

TEST_F(CallClientTest, IdleWaitEndsWhenAnotherThreadCompletesTheFuture) {
  const Future future = newFuture();
  std::thread other([&] { complete(future, "done"); });
  calls_.waitIdle(*future);
  EXPECT_TRUE(future->completed());
  other.join();
  calls_.waitIdle(*future); // returns at once
}

TEST_F(CallClientTest, WaitCanBeInterrupted) {
  isInterrupted_ = true;
  const Future future = call();
  EXPECT_THROW(calls_.waitIdle(*future), Interrupted);
  EXPECT_THROW(calls_.waitDriving(*future), Interrupted);
  EXPECT_EQ(calls_.open(), 1u) << "the call goes on";
}

TEST_F(CallClientTest, WaitEndsWithTheAgent) {
  const Future future = call();
  one_.lifetime.close();
  calls_.waitDriving(*future);
  calls_.waitIdle(*future);
  EXPECT_FALSE(future->completed());
}

} // namespace
} // namespace torch_ucx_rpc
