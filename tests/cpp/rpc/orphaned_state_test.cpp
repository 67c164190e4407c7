// When a worker is gone, its entries in torch's tables are released, and hopeless waits end.

#include "rpc/orphaned_state.h"

#include "agent_parts_of.h"
#include "fake_rpc_agent.h"
#include "handlers.h"
#include "test_worker.h"
#include "torch_glue/torch_state.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using rpc::ForkId;
using rpc::RRefContext;
using rpc::RRefId;
using torch::distributed::autograd::DistAutogradContainer;

class OrphanedStateTest : public testing::Test {
 protected:
  // torch has one set of tables per process. Here it is worker 0's.
  static void SetUpTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0));
    DistAutogradContainer::init(0);
    (void)RRefContext::getInstance();
  }
  static const rpc::RpcAgent& torchsAgent() {
    return *rpc::RpcAgent::getCurrentRpcAgent();
  }

  OrphanedStateTest() {
    worker_.startThreads();
  }
  ~OrphanedStateTest() override {
    worker_.close();
    for (const int64_t context : contexts_) {
      DistAutogradContainer::getInstance().releaseContextIfPresent(context);
    }
  }

  // Opens a context of distributed autograd for a worker.
  int64_t openContext(Rank rank) {
    static int64_t count = 0;
    const int64_t id = (int64_t{rank} << 48) + ++count;
    (void)DistAutogradContainer::getInstance().getOrCreateContext(id);
    contexts_.push_back(id);
    return id;
  }
  static bool isOpen(int64_t context) {
    try {
      DistAutogradContainer::getInstance().isValidContext(context);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void end(Rank rank, Peer::State state = Peer::State::kFailed) {
    Peer& peer = worker_.peer(rank);
    ASSERT_TRUE(peer.moveTo(state, peer.lost({ErrorCode::kPeerFailed, "it died"})));
    orphans_.onPeerGone(peer);
  }
  // Waits until all queued work is done.
  void drain() {
    EXPECT_TRUE(eventually([&] { return worker_.holds() == 0; }));
  }
  // Returns the references that torch has deleted.
  std::vector<std::pair<int64_t, int64_t>> deleted() {
    const std::lock_guard lock(mutex_);
    return deleted_;
  }

  std::mutex mutex_;
  std::vector<std::pair<int64_t, int64_t>> deleted_; // RRef and fork; guarded by mutex_
  Callback callback_{[this](Message& request) {
    const std::pair<RRefId, ForkId> ids = rpc::ForkMessageBase::fromMessage(request, MessageType::RREF_USER_DELETE);
    (void)RRefContext::getInstance().delForkOfOwner(ids.first, ids.second); // as torch's own handler does
    const std::lock_guard lock(mutex_);
    deleted_.emplace_back(ids.first.localId_, ids.second.localId_);
    return completed("");
  }};

  std::vector<int64_t> contexts_;
  LoopbackNetwork network_;
  Handlers others_;
  TestWorker worker_{network_, 0, membersOf(3), others_.all};
  OrphanedState orphans_{partsOf(worker_), torchsAgent(), callback_};
};

TEST_F(OrphanedStateTest, OnlyContextsOfGoneWorkersAreClosed) {
  const int64_t gone = openContext(1);
  const int64_t own = openContext(0);
  const int64_t other = openContext(2);
  end(1);
  EXPECT_TRUE(eventually([&] { return !isOpen(gone); }));
  EXPECT_TRUE(isOpen(own));
  EXPECT_TRUE(isOpen(other));
}

TEST_F(OrphanedStateTest, ReferencesOfGoneWorkersAreDeleted) {
  RRefContext::getInstance().addForkOfOwner({0, 1}, {1, 11});
  RRefContext::getInstance().addForkOfOwner({0, 2}, {2, 22});
  RRefContext::getInstance().addForkOfOwner({0, 3}, {2, 33});
  (void)orphans_.holders().note(1, *rpc::RRefForkRequest({0, 3}, {2, 33}).toMessage());
  end(1);
  EXPECT_TRUE(eventually([&] { return deleted().size() == 2; }));
  drain();
  std::vector<std::pair<int64_t, int64_t>> sorted = deleted();
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, (std::vector<std::pair<int64_t, int64_t>>{{1, 11}, {3, 33}}));
  (void)RRefContext::getInstance().delForkOfOwner({0, 2}, {2, 22});
}

TEST_F(OrphanedStateTest, LaterStateOfRunningHandlersIsReleasedOnceASecond) {
  end(1);
  drain();
  const int64_t late = openContext(1);
  worker_.advance(milliseconds(999));
  drain();
  EXPECT_TRUE(isOpen(late));
  worker_.advance(milliseconds(1));
  EXPECT_TRUE(eventually([&] { return !isOpen(late); }));
  const int64_t later = openContext(1);
  worker_.advance(milliseconds(1000));
  EXPECT_TRUE(eventually([&] { return !isOpen(later); }));
}

TEST_F(OrphanedStateTest, NothingIsReleasedWhileAllWorkersLive) {
  const int64_t context = openContext(1);
  worker_.advance(std::chrono::hours(1));
  drain();
  EXPECT_TRUE(isOpen(context));
}

TEST_F(OrphanedStateTest, WaitForAValueOfAGoneWorkerEndsAndSaysWhy) {
  const auto wait = RRefContext::getInstance().getOwnerRRef({1, 7});
  const auto other = RRefContext::getInstance().getOwnerRRef({2, 7});
  end(1);
  const auto failed = rpcFailure(wait);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), RpcFailure::Kind::kRRefLost);
  EXPECT_EQ(failed->details().name, "w1");
  EXPECT_EQ(failed->details().rank, 1);
  EXPECT_TRUE(contains(failed->what(), "this RRef will never have a value: lost worker 'w1'")) << failed->what();
  drain();
  EXPECT_FALSE(other->completed());
  end(2);
  EXPECT_TRUE(rpcFailure(other));
}

TEST_F(OrphanedStateTest, RequestThatCameBeforeAGoodbyeStillMakesItsValue) {
  const auto wait = RRefContext::getInstance().getOwnerRRef({1, 8});
  worker_.peer(1).requestsOpen.fetch_add(1);
  end(1, Peer::State::kLeft);
  drain();
  EXPECT_FALSE(wait->completed());
  worker_.peer(1).requestsOpen.fetch_sub(1); // the call is answered without a value
  worker_.advance(std::chrono::seconds(1));
  EXPECT_TRUE(rpcFailure(wait));
}

TEST_F(OrphanedStateTest, ValueOfAReplacedWorkerNeverComesInADynamicGroup) {
  orphans_.setDynamic();
  constexpr int64_t kFirst = int64_t{1} << 41;
  const auto wait = RRefContext::getInstance().getOwnerRRef({1, 9}); // a value of worker 1's earlier life
  const auto fresh = RRefContext::getInstance().getOwnerRRef({1, kFirst + 9});
  Peer& before = worker_.peer(1);
  ASSERT_TRUE(before.moveTo(Peer::State::kFailed, before.lost({ErrorCode::kPeerFailed, "it died"})));
  Member taker = memberOf(1);
  taker.session = 500;
  taker.firstRRefId = kFirst;
  worker_.directory.add(taker);
  orphans_.onPeerGone(before);
  const auto failed = rpcFailure(wait);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), RpcFailure::Kind::kRRefLost);
  EXPECT_TRUE(contains(failed->what(), "another has its rank, 1, now")) << failed->what();
  drain();
  EXPECT_FALSE(fresh->completed()) << "the worker with the rank now may still make it";
  worker_.directory.at(Rank{1}).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "gone too"});
  orphans_.onPeerGone(worker_.directory.at(Rank{1}));
  EXPECT_TRUE(rpcFailure(fresh));
}

// A handler that still runs for the dead worker opens the context after another worker has taken the rank.
TEST_F(OrphanedStateTest, ContextOfAReplacedWorkerIsClosedInADynamicGroup) {
  orphans_.setDynamic();
  const int64_t late = openContext(1);
  const int64_t fresh = openContext(1);
  Peer& before = worker_.peer(1);
  Member taker = memberOf(1);
  taker.session = 500;
  taker.firstContextId = contextNumber(fresh);
  ASSERT_TRUE(before.moveTo(Peer::State::kFailed, before.lost({ErrorCode::kPeerFailed, "it died"})));
  worker_.directory.add(taker);
  orphans_.onPeerGone(worker_.peer(2)); // worker 2 ends long after worker 1
  worker_.advance(std::chrono::seconds(1));
  EXPECT_TRUE(eventually([&] { return !isOpen(late); }));
  EXPECT_TRUE(isOpen(fresh)) << "the worker with the rank now has opened it";
}

TEST_F(OrphanedStateTest, ContextsOfOthersAreClosedAtTheEndOfTheAgent) {
  const int64_t own = openContext(0);
  const int64_t others = openContext(1);
  orphans_.closeContextsOfOthers();
  EXPECT_FALSE(isOpen(others));
  EXPECT_TRUE(isOpen(own)) << "its opener closes it";
}

TEST_F(OrphanedStateTest, ShutdownEndsWaitsForNewsThatNoWorkerWillSend) {
  RRefContext& context = RRefContext::getInstance();
  const auto create = [&](const Future& creation) {
    c10::intrusive_ptr<rpc::UserRRef> rref = context.createUserRRef(1, at::AnyType::get());
    if (creation != nullptr) {
      rref->registerOwnerCreationFuture(creation);
    }
    context.addPendingUser(rref->forkId(), rref);
    return rref;
  };
  const auto lost = c10::make_intrusive<JitFuture>(at::AnyType::get());
  lost->setError(std::make_exception_ptr(RpcFailure(RpcFailure::Kind::kWorkerLost, "it died")));
  const auto passedOn = create(lost);
  context.addPendingChild({0, 55}, passedOn);
  const auto inMaking = create(c10::make_intrusive<JitFuture>(at::AnyType::get()));
  const auto reported = create(nullptr);

  orphans_.releaseReferences();
  EXPECT_EQ(passedOn.use_count(), 1u) << "torch keeps it no more";
  EXPECT_FALSE(inMaking->confirmedByOwner()) << "its owner may still answer";
  EXPECT_FALSE(reported->confirmedByOwner()) << "the answer to the report is still to come";
  EXPECT_EQ(context.getDebugInfo().at("num_pending_users"), "2");
  orphans_.releaseReferences();
  context.delPendingChild({0, 55}); // late news
  context.delPendingUser(inMaking->forkId());
  context.delPendingUser(reported->forkId());
}

TEST_F(OrphanedStateTest, AgentThatIsNotTorchsCurrentOneReleasesNothing) {
  const FakeRpcAgent another(0);
  // This worker has its own timer, so that tasks are added before threads start.
  TestWorker worker(network_, 1, membersOf(3), others_.all);
  OrphanedState orphans(partsOf(worker), another, callback_);
  worker.startThreads();
  const int64_t context = openContext(2);
  ASSERT_TRUE(worker.peer(2).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  orphans.onPeerGone(worker.peer(2));
  worker.advance(std::chrono::seconds(1));
  EXPECT_EQ(worker.holds(), 0) << "nothing is queued";
  orphans.closeContextsOfOthers();
  EXPECT_TRUE(isOpen(context));
  worker.close();
}

TEST_F(OrphanedStateTest, NothingIsQueuedWhileTheAgentIsBeingDestroyed) {
  const int64_t context = openContext(1);
  worker_.endLifetime();
  end(1);
  worker_.advance(std::chrono::seconds(1));
  EXPECT_TRUE(isOpen(context));
}

} // namespace
} // namespace torch_ucx_rpc
