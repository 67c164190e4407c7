// The workers that hold references to RRefs of this process, and the waits for values that never come.

#include "torch_glue/rref_holders.h"

#include "fake_rpc_agent.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using rpc::ForkId;
using rpc::RRefContext;
using rpc::RRefId;

class RRefHoldersTest : public testing::Test {
 protected:
  // torch has one set of tables per process. Here it is worker 0's.
  static void SetUpTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0));
    (void)RRefContext::getInstance();
  }
  ~RRefHoldersTest() override {
    for (const auto& [rref, fork] : forks_) {
      (void)RRefContext::getInstance().delForkOfOwner(rref, fork);
    }
    for (const WaitForValue& wait : holders_.takeHopelessWaits([](const RRefId&) { return true; })) {
      wait.future->setError(std::make_exception_ptr(std::runtime_error("the test is over")));
    }
  }

  // Notes a reference of another worker, as torch does.
  void addFork(RRefId rref, ForkId fork) {
    RRefContext::getInstance().addForkOfOwner(rref, fork);
    forks_.emplace_back(rref, fork);
  }
  std::vector<int64_t> heldBy(rpc::worker_id_t rank) {
    std::vector<int64_t> held;
    for (const HeldFork& fork : holders_.takeHeldBy({rank})) {
      held.push_back(fork.fork.localId_);
    }
    return held;
  }
  std::shared_ptr<void> noteRemoteCall(rpc::worker_id_t sender, RRefId result) {
    const c10::IValue id = result.toIValue();
    return note(sender, *rpc::PythonRemoteCall(rpc::SerializedPyObj("", {}), id, id, false).toMessage()).making;
  }
  RRefHolders::Noted note(rpc::worker_id_t sender, const rpc::Message& request) {
    return holders_.note(sender, request);
  }
  // Returns the value that a reported reference's deletion has to wait for.
  c10::intrusive_ptr<rpc::JitFuture> deletionWaitsFor(RRefId rref, ForkId fork) {
    (void)note(2, *rpc::RRefForkRequest(rref, fork).toMessage());
    return note(2, *rpc::RRefUserDelete(rref, fork).toMessage()).after;
  }
  // Returns the creators of the awaited values that never come if worker `gone` is dead.
  std::vector<rpc::worker_id_t> hopelessWaits(rpc::worker_id_t gone) {
    std::vector<rpc::worker_id_t> creators;
    for (const WaitForValue& wait :
         holders_.takeHopelessWaits([gone](const RRefId& id) { return id.createdOn_ == gone; })) {
      creators.push_back(wait.creator);
      wait.future->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error("in vain")));
    }
    return creators;
  }

  using Ids = std::vector<int64_t>;
  using Ranks = std::vector<rpc::worker_id_t>;

  std::vector<std::pair<RRefId, ForkId>> forks_;
  RRefHolders holders_;
};

TEST_F(RRefHoldersTest, ReferenceOfTheCallerOfRemoteBearsItsRank) {
  addFork({0, 1}, {1, 11});
  addFork({0, 2}, {2, 22});
  EXPECT_EQ(heldBy(1), Ids{11});
  EXPECT_EQ(heldBy(2), Ids{22});
  EXPECT_EQ(heldBy(3), Ids{});
}

TEST_F(RRefHoldersTest, ReferenceFromAThirdWorkerBelongsToItsReporter) {
  addFork({0, 1}, {1, 11});
  const RRefHolders::Noted noted = note(2, *rpc::RRefForkRequest({0, 1}, {1, 11}).toMessage());
  EXPECT_EQ(noted.making, nullptr);
  EXPECT_EQ(noted.after, nullptr);
  EXPECT_EQ(heldBy(1), Ids{}) << "it gave the reference away";
  EXPECT_EQ(heldBy(2), Ids{11});
}

TEST_F(RRefHoldersTest, ReportIsForgottenOnceItIsTaken) {
  addFork({0, 1}, {1, 11});
  (void)note(2, *rpc::RRefForkRequest({0, 1}, {1, 11}).toMessage());
  EXPECT_EQ(heldBy(2), Ids{11});
  EXPECT_EQ(heldBy(2), Ids{}) << "another worker may have the rank by now";
}

TEST_F(RRefHoldersTest, DeletedReferenceHasNoHolder) {
  (void)note(2, *rpc::RRefForkRequest({0, 1}, {1, 11}).toMessage());
  (void)note(2, *rpc::RRefUserDelete({0, 1}, {1, 11}).toMessage());
  EXPECT_EQ(heldBy(2), Ids{}) << "torch no longer knows it";
  addFork({0, 1}, {1, 11});
  EXPECT_EQ(heldBy(2), Ids{}) << "the report is not kept either";
  EXPECT_EQ(heldBy(1), Ids{11});
}

TEST_F(RRefHoldersTest, DeletionOfTheOnlyReferenceWaitsForTheValue) {
  const auto owned = RRefContext::getInstance().getOrCreateOwnerRRef({1, 6}, at::AnyType::get());
  addFork({1, 6}, {1, 61}); // a third worker's
  EXPECT_EQ(deletionWaitsFor({1, 6}, {1, 61}), owned->getFuture());
  EXPECT_EQ(note(1, *rpc::RRefUserDelete({1, 6}, {1, 61}).toMessage()).after, nullptr) << "it was not reported";
  addFork({1, 6}, {1, 60}); // of the caller of rpc.remote()
  EXPECT_EQ(deletionWaitsFor({1, 6}, {1, 61}), nullptr) << "there is another";
}

TEST_F(RRefHoldersTest, DeletionWaitsForNoOtherRRef) {
  const auto owned = RRefContext::getInstance().getOrCreateOwnerRRef({1, 5}, at::AnyType::get());
  addFork({1, 4}, {1, 41});
  EXPECT_EQ(deletionWaitsFor({1, 4}, {1, 41}), nullptr) << "no call waits for its value";
  addFork({1, 5}, {1, 51});
  owned->setValue(1);
  EXPECT_EQ(deletionWaitsFor({1, 5}, {1, 51}), nullptr) << "it has a value";
}

TEST_F(RRefHoldersTest, OtherRequestsAreNotNoted) {
  for (const auto type : {MessageType::PYTHON_CALL, MessageType::RREF_CHILD_ACCEPT}) {
    const RRefHolders::Noted noted = note(1, *makeMessage(type, "not a pickle"));
    EXPECT_EQ(noted.making, nullptr);
    EXPECT_EQ(noted.after, nullptr);
  }
}

TEST_F(RRefHoldersTest, UnreadableRequestOfTorchIsReported) {
  EXPECT_ANY_THROW((void)note(1, *makeMessage(MessageType::RREF_FORK_REQUEST, "not a pickle")));
  EXPECT_ANY_THROW((void)note(1, *makeMessage(MessageType::PYTHON_REMOTE_CALL, "not a pickle")));
}

TEST_F(RRefHoldersTest, OnlyWaitsForValuesOfGoneWorkersAreFound) {
  RRefContext& context = RRefContext::getInstance();
  const auto pending = context.getOwnerRRef({1, 7}); // a wait that began before rpc.remote() arrived
  const auto other = context.getOwnerRRef({2, 7});
  const auto owned = context.getOrCreateOwnerRRef({1, 8}, at::AnyType::get());
  EXPECT_EQ(hopelessWaits(1), (Ranks{1, 1}));
  EXPECT_TRUE(pending->hasError());
  EXPECT_TRUE(owned->getFuture()->hasError());
  EXPECT_FALSE(other->completed());
  EXPECT_EQ(hopelessWaits(1), Ranks{}) << "each is ended once";
}

TEST_F(RRefHoldersTest, ValueThatIsBeingMadeIsStillToCome) {
  const auto owned = RRefContext::getInstance().getOrCreateOwnerRRef({1, 9}, at::AnyType::get());
  std::shared_ptr<void> making = noteRemoteCall(1, {1, 9});
  ASSERT_NE(making, nullptr);
  EXPECT_EQ(hopelessWaits(1), Ranks{});
  making.reset();
  EXPECT_EQ(hopelessWaits(1), Ranks{1});
}

} // namespace
} // namespace torch_ucx_rpc
