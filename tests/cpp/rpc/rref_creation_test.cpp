// Calls of rpc.remote(): the owner and torch both learn how the creation of an RRef has ended.

#include "rpc/call_client.h"

#include "call_client_fixture.h"
#include "fake_rpc_agent.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <chrono>
#include <memory>
#include <utility>

namespace torch_ucx_rpc {
namespace {

using Kind = RpcFailure::Kind;

class RRefCreationTest : public CallClientTest {
 protected:
  static void SetUpTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0));
  }
  static void TearDownTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(nullptr);
  }

  Future create() {
    one_.now.store(Timer::Clock::now()); // deadlines count from then
    Future creation = call("create", std::chrono::hours(5), MessageType::PYTHON_REMOTE_CALL);
    (void)arrivedCall();
    return creation;
  }
};

// After its request has left, a thread in rpc.remote() may be interrupted for longer than the timeout.
TEST_F(RRefCreationTest, CreationThatTimesOutFailsOnceTorchKnowsItsRRef) {
  const Future creation = create();
  one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
  EXPECT_EQ(calls_.open(), 1u);
  EXPECT_EQ(calls_.timedOut(), 0u);

  rpc::RRefContext& context = rpc::RRefContext::getInstance();
  const c10::intrusive_ptr<rpc::UserRRef> rref = context.createUserRRef(1, at::AnyType::get());
  rref->registerOwnerCreationFuture(creation);
  context.addPendingUser(rref->forkId(), rref);
  one_.advance(milliseconds(1));
  EXPECT_EQ(rpcFailure(creation)->kind(), Kind::kTimedOut);
  EXPECT_EQ(calls_.timedOut(), 1u);
  EXPECT_THROW((void)rref->toHere(), c10::Error) << "torch says that the creation has timed out";
  context.delPendingUser(rref->forkId());
}

TEST_F(RRefCreationTest, CreationThatTorchNeverKnowsTimesOutToo) {
  const Future creation = create();
  one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
  EXPECT_EQ(calls_.open(), 1u);
  one_.advance(std::chrono::hours(1));
  EXPECT_EQ(rpcFailure(creation)->kind(), Kind::kTimedOut);
}

// torch deletes its reference as soon as rpc.remote() has timed out. Owners forget a deletion that arrives before the
// value.
TEST_F(RRefCreationTest, DeletionOfATimedOutRRefIsRepeatedWhenTheOwnerAnswers) {
  const Future creation = create();
  const uint64_t id = callee_.requests.back().header.callId;
  rpc::RRefContext& context = rpc::RRefContext::getInstance();
  const c10::intrusive_ptr<rpc::UserRRef> rref = context.createUserRRef(1, at::AnyType::get());
  rref->registerOwnerCreationFuture(creation);
  context.addPendingUser(rref->forkId(), rref);
  one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
  EXPECT_EQ(rpcFailure(creation)->kind(), Kind::kTimedOut);
  context.delPendingUser(rref->forkId());

  const auto acknowledge = [&](uint64_t number) {
    ASSERT_EQ(callee_.requests.size(), number);
    answerWith(callee_.requests.back().header.callId, rpc::RRefAck().toMessage());
  };
  const auto deleteReference = [&] {
    Future deletion =
        calls_.send(one_.peer(1), rpc::RRefUserDelete(rref->rrefId(), rref->forkId()).toMessage(), milliseconds(0), {});
    two_.takeIn();
    return deletion;
  };
  // The function returned a future, so the owner knows the reference and forgets it now.
  const Future deletion = deleteReference();
  acknowledge(2);
  EXPECT_EQ(answer(deletion)->type(), MessageType::RREF_ACK);
  EXPECT_TRUE(calls_.owesDeletions());
  EXPECT_EQ(calls_.open(), 0u);

  EXPECT_TRUE(calls_.isAwaited(one_.peer(1), id));
  answerWith(id, "made");
  EXPECT_EQ(calls_.timedOut(), 1u);
  EXPECT_FALSE(calls_.owesDeletions());
  EXPECT_EQ(calls_.open(), 1u) << "the second deletion";
  two_.takeIn();
  acknowledge(3);
  EXPECT_EQ(calls_.open(), 0u);

  // A deletion after the answer is sent once.
  const Future again = deleteReference();
  acknowledge(4);
  EXPECT_EQ(answer(again)->type(), MessageType::RREF_ACK);
  EXPECT_EQ(calls_.open(), 0u);
}

// A call to oneself, after torch has registered it as rpc.remote() does.
class OwnCreationTest : public RRefCreationTest {
 protected:
  OwnCreationTest() {
    context_.addSelfAsFork(rref_);
    rref_->registerOwnerCreationFuture(creation_);
    creation_->addCallback(
        [id = rref_->rrefId()](JitFuture& future) { (void)rpc::callback::finishCreatingOwnerRRef(future, id); });
  }
  void timeOut() {
    one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
    EXPECT_EQ(rpcFailure(creation_)->kind(), Kind::kTimedOut);
  }

  rpc::RRefContext& context_ = rpc::RRefContext::getInstance();
  c10::intrusive_ptr<rpc::OwnerRRef> rref_ = context_.createOwnerRRef(at::AnyType::get());
  const Future value_ = rref_->getFuture();
  const Future creation_ = [this] {
    one_.now.store(Timer::Clock::now());
    return call("create", std::chrono::hours(5), MessageType::PYTHON_REMOTE_CALL, 0);
  }();
};

TEST_F(OwnCreationTest, WaitForAnRRefThatTorchForgetsEnds) {
  timeOut();
  const auto failed = rpcFailure(value_);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kRRefLost);
  EXPECT_EQ(failed->details().name, "w0");
  EXPECT_THROW(rref_->setValue(at::IValue(5)), c10::Error) << "torch drops a later value";
  EXPECT_TRUE(value_->hasError());
}

TEST_F(OwnCreationTest, WaitGoesOnWhileAnotherWorkerHasAReference) {
  context_.addForkOfOwner(rref_->rrefId(), {1, 11});
  timeOut();
  EXPECT_FALSE(value_->completed());
  rref_->setValue(at::IValue(5));
  EXPECT_EQ(value_->value().toInt(), 5);
  (void)context_.delForkOfOwner(rref_->rrefId(), {1, 11});
}

class FailedCreationTest : public RRefCreationTest {
 protected:
  ~FailedCreationTest() override {
    context_.delPendingUser(rref_->forkId());
  }

  // torch knows the RRef.
  void registerRRef() {
    rref_->registerOwnerCreationFuture(creation_);
    context_.addPendingUser(rref_->forkId(), rref_);
  }
  void fail(uint64_t callId) {
    answerWith(callId, makeMessage(MessageType::EXCEPTION, "no such module"));
  }
  void refuse(uint64_t callId) {
    calls_.onRefused(one_.peer(1), callId, {ErrorCode::kOutOfThreads, "no thread left"});
  }
  // Returns the id of the last of `number` requests, which reports the failure to the owner.
  uint64_t failureThatIsSent(size_t number) {
    EXPECT_TRUE(eventually([&] {
      two_.takeIn();
      return callee_.requests.size() == number;
    }));
    EXPECT_EQ(wire::messageTypeOf(callee_.requests.back().body()), MessageType::EXCEPTION);
    return callee_.requests.back().header.callId;
  }
  void confirm(uint64_t callId) {
    answerWith(callId, rpc::RemoteRet(rref_->rrefId(), rref_->forkId()).toMessage());
    EXPECT_EQ(answer(creation_)->type(), MessageType::REMOTE_RET);
    EXPECT_EQ(calls_.open(), 0u);
  }

  rpc::RRefContext& context_ = rpc::RRefContext::getInstance();
  const c10::intrusive_ptr<rpc::UserRRef> rref_ = context_.createUserRRef(1, c10::PyObjectType::get());
  const Future creation_ = create();
  const uint64_t id_ = callee_.requests.back().header.callId;
};

TEST_F(FailedCreationTest, OwnerHearsOfItsError) {
  registerRRef();
  fail(id_);
  const uint64_t told = failureThatIsSent(2);
  EXPECT_FALSE(creation_->completed());
  EXPECT_EQ(calls_.open(), 1u);
  confirm(told);
}

TEST_F(FailedCreationTest, OwnerHearsThatItHasRefused) {
  registerRRef();
  refuse(id_);
  confirm(failureThatIsSent(2));
}

TEST_F(FailedCreationTest, OwnerHearsOfTheFailureOnceTorchKnowsTheRRef) {
  fail(id_);
  EXPECT_TRUE(eventually([&] { return calls_.opened() == 2; })) << "it waits in the table";
  one_.advance(milliseconds(1));
  EXPECT_EQ(callee_.requests.size(), 1u);
  registerRRef();
  one_.advance(milliseconds(10));
  confirm(failureThatIsSent(2));
}

TEST_F(FailedCreationTest, OwnerWithoutRoomForTheFailureHearsOfItAgain) {
  registerRRef();
  refuse(id_);
  refuse(failureThatIsSent(2));
  EXPECT_EQ(calls_.open(), 1u);
  one_.advance(std::chrono::seconds(1));
  confirm(failureThatIsSent(3));
}

TEST_F(FailedCreationTest, FailureThatTheOwnerDoesNotAcceptEndsTheCall) {
  registerRRef();
  fail(id_);
  fail(failureThatIsSent(2));
  EXPECT_EQ(failure(creation_), "no such module");
}

TEST_F(FailedCreationTest, OwnerThatDiesEndsTheCall) {
  registerRRef();
  fail(id_);
  (void)failureThatIsSent(2);
  endCallee(Peer::State::kFailed, ErrorCode::kPeerFailed, "it has died");
  EXPECT_EQ(rpcFailure(creation_)->kind(), Kind::kWorkerLost);
}

TEST_F(FailedCreationTest, FailedCreationEndsAtItsTimeout) {
  registerRRef();
  fail(id_);
  (void)failureThatIsSent(2);
  one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
  EXPECT_EQ(rpcFailure(creation_)->kind(), Kind::kTimedOut);
}

TEST_F(RRefCreationTest, CreationThatExpiresDuringTheShutdownFailsWithIt) {
  const Future creation = create();
  one_.lifetime.close();
  one_.advance(std::chrono::hours(5) + std::chrono::seconds(1));
  EXPECT_EQ(rpcFailure(creation)->kind(), Kind::kShutDown);
}

} // namespace
} // namespace torch_ucx_rpc
