// Requests to one worker; the test is the caller. Each request is answered once, or refused with the reason.

#include "rpc/request_server.h"

#include "agent_parts_of.h"
#include "gate.h"
#include "handlers.h"
#include "tensors/self_copy.h"
#include "tensors/tensor_codec.h"
#include "test_worker.h"
#include "torch_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Notes = std::vector<std::string>;

class RequestServerTest : public testing::Test {
 protected:
  RequestServerTest() {
    mine_.requests = &server_;
    one_.startThreads();
  }
  ~RequestServerTest() override {
    gate_.open();
    one_.close();
    two_.close();
    caller_.answers.clear();
    EXPECT_EQ(server_.openAsync(), 0);
    EXPECT_EQ(one_.peer(1).requestsOpen.load(), 0);
  }

  // The caller is worker 1.
  void call(
      uint64_t callId,
      const std::string& text = "call",
      MessageType type = MessageType::PYTHON_CALL,
      uint32_t deadlineMs = 0) {
    Peer& callee = two_.peer(0);
    auto message = encodeMessage(makeMessage(type, text), callee, {}, &two_.messenger.transport());
    message->header.deadlineMs = deadlineMs;
    two_.messenger.post(callee, wire::Kind::kRequest, callId, std::move(message));
    one_.takeIn();
  }
  // Waits for the answer to this call. Throws if it does not come, or cannot be read.
  c10::intrusive_ptr<Message> answerOf(uint64_t callId) {
    if (!eventually([&] {
          two_.takeIn();
          return std::ranges::any_of(
              caller_.answers, [&](const IncomingMessage& answer) { return answer.header.callId == callId; });
        })) {
      throw std::runtime_error("no answer");
    }
    DecodedMessage decoded;
    const auto arrived = std::ranges::find_if(
        caller_.answers, [&](const IncomingMessage& answer) { return answer.header.callId == callId; });
    const Error error = decodeMessage(std::move(*arrived), {}, decoded);
    caller_.answers.erase(arrived);
    if (error) {
      throw std::runtime_error(error.message());
    }
    return decoded.message;
  }
  // Waits for the next messages to the caller, and returns their notes.
  Notes nextNotes() {
    Notes notes;
    EXPECT_TRUE(eventually([&] {
      two_.takeIn();
      notes = caller_.takeNotes();
      return !notes.empty();
    }));
    return notes;
  }
  int64_t open() {
    return one_.peer(1).requestsOpen.load();
  }
  // Makes calls 1 to 4 wait at the gate. No further request may run then. Returns whether all have reached it.
  bool occupyAllThreads() {
    handler_ = [this](Message& request) {
      gate_.pass();
      return echo(request);
    };
    for (uint64_t callId = 1; callId <= 4; ++callId) {
      call(callId);
    }
    // One thread must lead. So on a machine with few cores only the timer starts the last thread.
    return eventually([&] {
      one_.advance(std::chrono::milliseconds(10));
      return gate_.waiting() == 4;
    });
  }

  LoopbackNetwork network_;
  Handlers caller_;
  Handlers others_;
  EventHandlers mine_ = others_.all;
  TestWorker one_{network_, 0, membersOf(2), mine_, &copyForSelf};
  TestWorker two_{network_, 1, membersOf(2), caller_.all, &copyForSelf};
  DeviceMaps deviceMaps_;
  RRefHolders holders_;
  Gate gate_;
  std::atomic<int> handled_{0};
  Handler handler_ = &echo;
  Callback callback_{[this](Message& request) {
    handled_.fetch_add(1);
    return handler_(request);
  }};
  RequestServer server_{partsOf(one_), callback_, holders_, deviceMaps_};
};

TEST_F(RequestServerTest, RequestIsServedOnAnAgentThreadAndAnsweredOnce) {
  std::thread::id servedOn;
  handler_ = [&](Message& request) {
    servedOn = std::this_thread::get_id();
    return echo(request);
  };
  call(7, "hello");
  const c10::intrusive_ptr<Message> answer = answerOf(7);
  EXPECT_EQ(textOf(*answer), "hello");
  EXPECT_EQ(answer->type(), MessageType::PYTHON_RET);
  EXPECT_NE(servedOn, std::this_thread::get_id());
  EXPECT_EQ(one_.peer(1).callsReceived.load(), 1u);
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
  EXPECT_TRUE(eventually([&] { return one_.holds() == 0; }));
  two_.takeIn();
  EXPECT_TRUE(caller_.answers.empty());
}

TEST_F(RequestServerTest, RequestIsOpenFromItsArrivalToItsAnswer) {
  handler_ = [&](Message& request) {
    gate_.pass();
    return echo(request);
  };
  call(1);
  EXPECT_EQ(open(), 1);
  call(2);
  EXPECT_EQ(open(), 2);
  EXPECT_GE(one_.holds(), 1) << "work that may outlast a shutdown";
  gate_.open();
  (void)answerOf(1);
  (void)answerOf(2);
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
}

TEST_F(RequestServerTest, RequestIsAnsweredWhenTheFutureOfItsHandlerIsComplete) {
  const Future later = newFuture();
  handler_ = [&](Message&) { return later; };
  call(1);
  ASSERT_TRUE(eventually([&] { return server_.openAsync() == 1; }));
  EXPECT_EQ(open(), 1) << "a worker that leaves waits for it";
  EXPECT_TRUE(eventually([&] { return one_.executor->counts().runningRequests == 0; })) << "it takes no thread";
  EXPECT_TRUE(eventually([&] { return one_.holds() == 0; })) << "the answer may never come";
  complete(later, "at last");
  EXPECT_EQ(server_.openAsync(), 0);
  EXPECT_EQ(textOf(*answerOf(1)), "at last");
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
}

TEST_F(RequestServerTest, HandlersExceptionIsTheAnswer) {
  handler_ = [](Message&) -> Future { throw std::runtime_error("boom"); };
  call(1);
  c10::intrusive_ptr<Message> answer = answerOf(1);
  EXPECT_EQ(answer->type(), MessageType::EXCEPTION);
  EXPECT_TRUE(contains(textOf(*answer), "boom"));
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
}

TEST_F(RequestServerTest, FailureOfAFutureIsTheAnswer) {
  const Future later = newFuture();
  handler_ = [&](Message&) { return later; };
  call(1);
  ASSERT_TRUE(eventually([&] { return server_.openAsync() == 1; }));
  later->setError(std::make_exception_ptr(std::runtime_error("late boom")));
  EXPECT_TRUE(contains(textOf(*answerOf(1)), "late boom"));
}

TEST_F(RequestServerTest, AnswerThatCannotBeSentIsAnExceptionThatSaysSo) {
  handler_ = [](Message&) { return completed("", {at::empty({2}, at::device(at::kMeta))}); };
  call(1);
  EXPECT_EQ(answerOf(1)->type(), MessageType::EXCEPTION);
}

TEST_F(RequestServerTest, OnlyRequestsThatRunNoUserCodeMayRunOnADriver) {
  const auto mayRun = [&](MessageType type) {
    IncomingMessage request;
    request.eagerBody =
        std::move(encodeMessage(makeMessage(type, ""), one_.peer(1), {}, &one_.messenger.transport())->body);
    return server_.mayRunOnDriver(request);
  };
  EXPECT_TRUE(mayRun(MessageType::RREF_CHILD_ACCEPT));
  EXPECT_FALSE(mayRun(MessageType::PYTHON_CALL));
  EXPECT_FALSE(mayRun(MessageType::RREF_USER_DELETE)) << "the value's destructor is user code";
  EXPECT_FALSE(server_.mayRunOnDriver({})) << "too short to say what it is";
}

TEST_F(RequestServerTest, DriverServesAShortRequestItself) {
  std::thread::id servedOn;
  handler_ = [&](Message& request) {
    servedOn = std::this_thread::get_id();
    return echo(request);
  };
  Peer& callee = two_.peer(0);
  two_.messenger.post(
      callee,
      wire::Kind::kRequest,
      3,
      encodeMessage(makeMessage(MessageType::RREF_CHILD_ACCEPT, "x"), callee, {}, &two_.messenger.transport()));
  one_.lead();
  EXPECT_EQ(servedOn, std::this_thread::get_id());
  EXPECT_EQ(open(), 0) << "it is answered";
  EXPECT_EQ(textOf(*answerOf(3)), "x");
}

TEST_F(RequestServerTest, RequestThatCannotBeTakenInIsRefusedWithTheReason) {
  server_.onRequestRejected(one_.peer(1), 4, outOfMemoryFor(9));
  EXPECT_EQ(
      nextNotes(), Notes{"refused: worker 'w0' could not receive this call: out of memory for a message of 9 bytes 4"});
  EXPECT_EQ(handled_.load(), 0);
}

TEST_F(RequestServerTest, RequestThatCannotBeReadIsRefused) {
  two_.messenger.post(two_.peer(0), wire::Kind::kRequest, 5, makeOutgoing(3));
  one_.takeIn();
  const Notes notes = nextNotes();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(notes[0].starts_with("refused: worker 'w0' could not receive this call: ")) << notes[0];
  EXPECT_TRUE(notes[0].ends_with(" 5")) << notes[0];
  EXPECT_EQ(handled_.load(), 0);
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
}

TEST_F(RequestServerTest, RefusedCallToOneselfRaisesAnException) {
  server_.onRequestRejected(one_.peer(0), 6, outOfMemoryFor(9));
  ASSERT_EQ(others_.takeNotes(), Notes{"answer 6"});
  DecodedMessage decoded;
  ASSERT_FALSE(decodeMessage(std::move(others_.answers[0]), {}, decoded));
  EXPECT_EQ(decoded.message->type(), MessageType::EXCEPTION);
}

TEST_F(RequestServerTest, CallerThatIsGoneGetsNothing) {
  ASSERT_TRUE(occupyAllThreads());
  call(5);
  EXPECT_EQ(open(), 5);
  ASSERT_TRUE(one_.peer(1).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  gate_.open();
  EXPECT_TRUE(eventually([&] { return open() == 0; })) << "requests that are not run are closed too";
  EXPECT_LT(handled_.load(), 5) << "the queued request is not run";
  server_.onRequestRejected(one_.peer(1), 9, outOfMemoryFor(9));
  two_.takeIn();
  EXPECT_EQ(caller_.takeNotes(), Notes{});
}

TEST_F(RequestServerTest, RequestWhoseCallerHasGivenUpIsNotRun) {
  ASSERT_TRUE(occupyAllThreads());
  call(5, "short", MessageType::PYTHON_CALL, 1);
  call(6, "long", MessageType::PYTHON_CALL, 3'600'000);
  const auto expiry = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
  ASSERT_TRUE(eventually([&] { return std::chrono::steady_clock::now() > expiry; }));
  gate_.open();
  EXPECT_EQ(textOf(*answerOf(6)), "long");
  EXPECT_TRUE(eventually([&] { return open() == 0; }));
  EXPECT_EQ(handled_.load(), 5);
  EXPECT_EQ(server_.expired(), 1u);
}

TEST_F(RequestServerTest, ShareOfTheWindowIsGivenBackWhenTheHandlerReturns) {
  const Future later = newFuture();
  uint64_t inUse = 0;
  handler_ = [&](Message&) {
    inUse = one_.messenger.window().inUseBytes();
    return later;
  };
  call(1, std::string(OutgoingMessage::kEagerBodyBytes + 1, 'x'));
  ASSERT_TRUE(eventually([&] { return server_.openAsync() == 1; }));
  EXPECT_GT(inUse, OutgoingMessage::kEagerBodyBytes);
  EXPECT_EQ(one_.messenger.window().inUseBytes(), 0u);
  complete(later, "done");
  (void)answerOf(1);
}

TEST_F(RequestServerTest, AnswerThatCannotBeSentIsReplacedByTheReason) {
  server_.onAnswerNotSent(one_.peer(1), 8, {ErrorCode::kDeviceFailed, "the device is on fire"}, false);
  EXPECT_TRUE(contains(textOf(*answerOf(8)), "the device is on fire"));
  server_.onAnswerNotSent(one_.peer(1), 9, {ErrorCode::kPeerFailed, "it died"}, false);
  two_.takeIn();
  const std::vector<std::string> notes = caller_.takeNotes();
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_EQ(notes[1], "refused: worker 'w0' could not send its answer: it died 9");
}

// The parts of two answers would contradict each other at the caller.
TEST_F(RequestServerTest, AnswerOfWhichSomePartsHaveLeftIsRefusedWithTheReason) {
  server_.onAnswerNotSent(one_.peer(1), 8, {ErrorCode::kDeviceFailed, "the device is on fire"}, true);
  two_.takeIn();
  EXPECT_EQ(caller_.takeNotes(), Notes{"refused: worker 'w0' could not send its answer: the device is on fire 8"});
}

// A failed endpoint refuses every message at once, until the loss of its peer is handed out.
TEST_F(RequestServerTest, RefusalThatCannotBeSentIsDropped) {
  network_.setFault([](const wire::Header&, SendMode) { return LoopbackNetwork::Fate::kFail; });
  server_.onAnswerNotSent(one_.peer(1), 9, {ErrorCode::kPeerFailed, "it died"}, false);
  one_.takeIn();
  two_.takeIn();
  EXPECT_EQ(caller_.takeNotes(), Notes());
}

TEST_F(RequestServerTest, ProfiledRequestHasAThreadOfItsOwn) {
  std::atomic<bool> isAgentThread{true};
  handler_ = [&](Message& request) {
    isAgentThread.store(Executor::isInTask());
    return echo(request);
  };
  call(1, "profiled", MessageType::RUN_WITH_PROFILING_REQ);
  EXPECT_EQ(textOf(*answerOf(1)), "profiled");
  EXPECT_FALSE(isAgentThread.load());
  call(2);
  (void)answerOf(2);
  EXPECT_TRUE(isAgentThread.load()) << "any other request runs on an agent thread";
}

TEST_F(RequestServerTest, NothingIsQueuedWhileTheAgentIsBeingDestroyed) {
  one_.endLifetime();
  call(1);
  EXPECT_EQ(open(), 0);
  EXPECT_EQ(one_.executor->counts().waitingRequests, 0u);
  EXPECT_EQ(handled_.load(), 0);
}

} // namespace
} // namespace torch_ucx_rpc
