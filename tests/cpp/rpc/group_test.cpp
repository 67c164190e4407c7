// Members of a group: their records, joins and leaves.

#include "rpc/group.h"

#include "rpc_worker.h"
#include "stalls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Kind = RpcFailure::Kind;
using State = Peer::State;
using Names = std::vector<std::string>;
using Fate = LoopbackNetwork::Fate;

class GroupTest : public testing::Test {
 protected:
  ~GroupTest() override {
    network_.setFault({});
    for (const auto& worker : workers_) {
      worker->close();
    }
  }

  RpcWorker& make(Rank rank) {
    return *workers_.emplace_back(std::make_unique<RpcWorker>(network_, rank, &echo, [this] {
      if (isInterrupted_.load()) {
        throw Interrupted();
      }
    }));
  }
  // A static group of workers 0, 1, ...
  void start(Rank size) {
    for (Rank rank = 0; rank < size; ++rank) {
      make(rank).group.addMembers(membersOf(size));
    }
    for (const auto& worker : workers_) {
      worker->parts.startDriving();
    }
  }
  RpcWorker& worker(Rank rank) {
    return *workers_.at(static_cast<size_t>(rank));
  }
  // Enters the barrier for each worker with its number, and returns the results.
  std::vector<int64_t> barrier(const std::vector<int64_t>& values) {
    std::vector<int64_t> sums(values.size());
    std::vector<std::thread> threads;
    for (size_t index = 0; index < values.size(); ++index) {
      threads.emplace_back(
          [&, index] { sums[index] = worker(static_cast<Rank>(index)).group.barrier(values[index], kPatience).sum; });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return sums;
  }
  static Names namesOf(const std::vector<WorkerInfo>& infos) {
    Names names;
    for (const WorkerInfo& info : infos) {
      names.push_back(info.name_);
    }
    return names;
  }
  static void lose(RpcWorker& by, Rank rank) {
    by.monitor.onFailure(by.peer(rank), {ErrorCode::kPeerFailed, "its process has ended"});
  }
  void drop(wire::Kind kind) {
    network_.setFault(
        [kind](const wire::Header& header, SendMode) { return header.kind == kind ? Fate::kDrop : Fate::kDeliver; });
  }

  LoopbackNetwork network_;
  std::atomic<bool> isInterrupted_{false};
  std::vector<std::unique_ptr<RpcWorker>> workers_;
};

// ------------------------------------------------------------------------------------------------------------ members

TEST_F(GroupTest, MembersAreKnownByRankAndNameAndTheirInfoStays) {
  Group& group = make(0).group;
  group.addMembers(membersOf(3));
  const WorkerInfo& info = group.info("w1");
  EXPECT_EQ(info.id_, 1);
  EXPECT_EQ(&group.info(Rank{1}), &info);
  EXPECT_EQ(namesOf(group.infos()), (Names{"w0", "w1", "w2"}));
  EXPECT_EQ(rpcFailureOf([&] { (void)group.info("w7"); })->kind(), Kind::kUnknownWorker);
  EXPECT_EQ(rpcFailureOf([&] { (void)group.info(Rank{7}); })->details().rank, 7);
}

TEST_F(GroupTest, RankOrNameThatIsTakenIsRefused) {
  Group& group = make(0).group;
  group.addMembers(membersOf(2));
  Member same = memberOf(1);
  same.session = 500;
  EXPECT_THROW(group.addMembers({same}), std::invalid_argument);
}

TEST_F(GroupTest, WorkerMustBeAmongItsMembers) {
  EXPECT_THROW(make(0).group.addMembers({memberOf(1), memberOf(2)}), c10::Error);
}

TEST_F(GroupTest, WorkersOfOneMachineAreNeighbours) {
  RpcWorker& self = make(0);
  std::vector<Member> members = membersOf(3);
  members[1].bootId = members[0].bootId;
  members[1].pidNamespace = 77; // a process in another namespace cannot be watched
  self.group.addMembers(members);
  EXPECT_TRUE(self.peer(1).isNeighbour.load());
  EXPECT_FALSE(self.peer(2).isNeighbour.load());
  EXPECT_FALSE(self.peer(0).isNeighbour.load());
}

TEST_F(GroupTest, NeighboursOfOtherPidNamespacesOrUsersUseTheNetwork) {
  RpcWorker& self = make(0);
  std::vector<Member> members = membersOf(5);
  for (Member& member : members) {
    member.bootId = "one machine";
  }
  members[1].pidNamespace = 77;
  members[2].user = "somebody else";
  members[4].bootId = "another machine";
  members[4].user = "somebody else";
  self.group.addMembers(members);
  EXPECT_TRUE(self.peer(1).isOverNetwork.load());
  EXPECT_TRUE(self.peer(2).isOverNetwork.load());
  EXPECT_FALSE(self.peer(3).isOverNetwork.load());
  EXPECT_FALSE(self.peer(4).isOverNetwork.load()) << "UCX knows that it is elsewhere";
}

TEST_F(GroupTest, MemberOfAStaticGroupStaysListedWhenItIsGone) {
  RpcWorker& self = make(0);
  self.group.addMembers(membersOf(2));
  lose(self, 1);
  EXPECT_EQ(namesOf(self.group.infos()), (Names{"w0", "w1"}));
  EXPECT_FALSE(self.group.isDynamic());
}

// ----------------------------------------------------------------------------------------------------------- barriers

TEST_F(GroupTest, BarrierSumsOverAllMembersRoundByRound) {
  start(3);
  EXPECT_EQ(barrier({1, 20, 300}), std::vector<int64_t>(3, 321));
  EXPECT_EQ(barrier({0, 0, 5}), std::vector<int64_t>(3, 5));
}

TEST_F(GroupTest, BarrierReleasesTheLivingAndNamesTheDead) {
  start(3);
  std::thread killer([&] {
    lose(worker(0), 1);
    lose(worker(2), 1);
  });
  std::thread other([&] { worker(2).group.barrier(20, kPatience); });
  const Barrier::Result result = worker(0).group.barrier(1, kPatience);
  killer.join();
  other.join();
  EXPECT_EQ(result.sum, 21);
  EXPECT_TRUE(contains(result.lost.message(), "lost worker 'w1'")) << result.lost.message();
}

TEST_F(GroupTest, JoinNamesTheDeadWhenTheLivingHaveCome) {
  start(3);
  for (const Rank rank : {0, 2}) {
    lose(worker(rank), 1);
  }
  std::optional<RpcFailure> others;
  std::thread other([&] { others = rpcFailureOf([&] { worker(2).group.join(kPatience, kPatience); }); });
  const auto failed = rpcFailureOf([&] { worker(0).group.join(kPatience, kPatience); });
  other.join();
  ASSERT_TRUE(failed && others);
  EXPECT_EQ(failed->kind(), Kind::kBarrierFailed);
  EXPECT_TRUE(contains(failed->details().cause, "lost worker 'w1'")) << failed->details().cause;
  EXPECT_TRUE(contains(failed->what(), "not all workers have come to it: lost worker 'w1'")) << failed->what();
  EXPECT_STREQ(others->what(), failed->what());
  EXPECT_TRUE(worker(0).monitor.isEverybodyLeaving()) << "the living workers end together";
}

TEST_F(GroupTest, WorkerThatHasLeftIsNotWaitedFor) {
  start(3);
  for (const Rank rank : {0, 1}) {
    worker(rank).monitor.onGoodbye(worker(rank).peer(2));
  }
  EXPECT_EQ(barrier({1, 2}), std::vector<int64_t>(2, 3));
}

TEST_F(GroupTest, BarrierThatTimesOutNamesTheMissing) {
  start(3);
  const auto failed = rpcFailureOf([&] { worker(0).group.barrier(0, milliseconds(1)); });
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kBarrierFailed);
  EXPECT_TRUE(contains(failed->what(), "worker 'w0' waited 1 ms for all workers")) << failed->what();
  EXPECT_TRUE(contains(failed->what(), "missing: worker 'w1'") && contains(failed->what(), ", worker 'w2'"))
      << failed->what();
}

TEST_F(GroupTest, BarrierEndsWithTheAgent) {
  start(2);
  worker(0).parts.lifetime.close();
  const auto failed = rpcFailureOf([&] { worker(0).group.barrier(0, milliseconds(0)); });
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kShutDown);
}

TEST_F(GroupTest, BarrierAndJoinCanBeInterrupted) {
  start(2);
  isInterrupted_.store(true);
  EXPECT_THROW(worker(0).group.barrier(0, milliseconds(0)), Interrupted);
}

TEST_F(GroupTest, JoinReturnsWhenNoCallIsOpen) {
  start(2);
  const Future answered = worker(0).call(1, "before the end");
  std::thread other([&] { worker(1).group.join(kPatience, kPatience); });
  worker(0).group.join(kPatience, kPatience);
  other.join();
  EXPECT_TRUE(eventually([&] { return answered->completed(); })) << "an agent thread is about to complete it";
  EXPECT_TRUE(worker(0).monitor.isEverybodyLeaving()) << "peers may vanish from now on";
  EXPECT_TRUE(worker(1).monitor.isEverybodyLeaving());
}

TEST_F(GroupTest, JoinWaitsOnceForCallsAndWorkers) {
  start(2);
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.kind == wire::Kind::kRequest ? Fate::kDrop : Fate::kDeliver;
  });
  const Future never = worker(0).call(1, "lost");
  const Stalls stalls;
  const auto began = std::chrono::steady_clock::now();
  const auto failed = rpcFailureOf([&] { worker(0).group.join(milliseconds(1000), kPatience); });
  ASSERT_TRUE(failed);
  EXPECT_TRUE(contains(failed->what(), "worker 'w0' waited 1000 ms for all workers")) << failed->what();
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - began;
  EXPECT_LT(lasted.count(), 1.9 + stalls.seconds());
}

TEST_F(GroupTest, JoinThatTimesOutFailsLikeABarrier) {
  start(2);
  const auto failed = rpcFailureOf([&] { worker(0).group.join(milliseconds(1), kPatience); });
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kBarrierFailed);
  EXPECT_FALSE(worker(0).monitor.isEverybodyLeaving());
}

// ---------------------------------------------------------------------------------------------------- ends of members

TEST_F(GroupTest, CallbackHearsOfEachPeerThatIsGoneOnAnAgentThread) {
  start(3);
  std::mutex mutex;
  Names gone;
  std::atomic<bool> isAgentThread{true};
  worker(0).group.setOnGone([&](const Peer& peer) {
    const std::lock_guard lock(mutex);
    isAgentThread.store(isAgentThread.load() && Executor::isInTask());
    gone.push_back(peer.member().name + (peer.state() == State::kFailed ? " failed" : " left"));
    throw std::runtime_error("a mistake of the user's");
  });
  testing::internal::CaptureStderr();
  lose(worker(0), 1);
  worker(0).monitor.onGoodbye(worker(0).peer(2));
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return gone.size() == 2;
  }));
  EXPECT_TRUE(eventually([&] { return worker(0).parts.holds() == 0; }));
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), "a mistake of the user's"));
  std::sort(gone.begin(), gone.end());
  EXPECT_EQ(gone, (Names{"w1 failed", "w2 left"}));
  EXPECT_TRUE(isAgentThread.load());
}

TEST_F(GroupTest, RemovedCallbackHearsNothing) {
  start(2);
  std::atomic<int> calls{0};
  worker(0).group.setOnGone([&](const Peer&) { calls.fetch_add(1); });
  worker(0).group.setOnGone({});
  lose(worker(0), 1);
  EXPECT_TRUE(eventually([&] { return worker(0).parts.holds() == 0; })) << "nothing is queued any more";
  EXPECT_EQ(calls.load(), 0);
}

// ----------------------------------------------------------------------------------------------------- dynamic groups

class DynamicMembersTest : public GroupTest {
 protected:
  ~DynamicMembersTest() override {
    network_.setFault({});
    for (const auto& worker : workers_) {
      worker->close(); // no keeper may write notes any more
    }
  }

  // Makes a worker that knows the earlier members. Each member knows it after admitting it.
  RpcWorker& join(Rank rank) {
    RpcWorker& made = make(rank);
    made.group.setMembership(
        {[this, &made, rank](const std::string& record) {
           if (record == "nobody") {
             note("w" + std::to_string(rank) + " refuses " + record);
             throw std::runtime_error("it is not wanted");
           }
           made.group.addMembers({memberOf(static_cast<Rank>(std::stoi(record)))});
           note("w" + std::to_string(rank) + " admits " + record);
         },
         [this, rank](uint64_t session) {
           note("w" + std::to_string(rank) + " has lost " + std::to_string(session));
         }});
    made.group.addMembers(membersOf(static_cast<Rank>(rank + 1)));
    made.parts.startDriving();
    return made;
  }
  // Lets the worker ask all earlier members.
  void announce(RpcWorker& joining, const std::string& record) {
    std::vector<uint64_t> sessions;
    for (Rank rank = 0; rank < joining.parts.identity.rank; ++rank) {
      sessions.push_back(memberOf(rank).session);
    }
    joining.group.announceJoin(record, sessions);
  }
  void note(const std::string& what) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(what);
  }
  bool isNoted(const std::string& what) {
    const std::lock_guard lock(mutex_);
    return std::find(notes_.begin(), notes_.end(), what) != notes_.end();
  }

  std::mutex mutex_;
  Names notes_; // guarded by mutex_
};

TEST_F(DynamicMembersTest, JoiningWorkerIsAdmittedByEachMember) {
  join(0);
  RpcWorker& joining = join(1);
  EXPECT_TRUE(joining.group.isDynamic());
  announce(joining, "1");
  EXPECT_TRUE(eventually([&] { return joining.group.unadmitted().empty(); }));
  EXPECT_TRUE(isNoted("w0 admits 1"));
  EXPECT_EQ(namesOf(worker(0).group.infos()), (Names{"w0", "w1"}));
  EXPECT_EQ(textOf(*answer(joining.call(0, "hello"))), "hello");
  EXPECT_EQ(textOf(*answer(worker(0).call(1, "welcome"))), "welcome");
}

TEST_F(DynamicMembersTest, MemberThatDoesNotAnswerGetsNoCalls) {
  join(0);
  RpcWorker& joining = join(1);
  drop(wire::Kind::kJoin);
  announce(joining, "1");
  EXPECT_EQ(namesOf(joining.group.unadmitted()), Names{"w0"});
  const Future waiting = joining.call(0, "waits to be admitted");
  EXPECT_FALSE(waiting->completed());
  lose(joining, 0);
  const auto failed = rpcFailure(waiting);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind(), Kind::kWorkerLost);
  EXPECT_TRUE(joining.group.unadmitted().empty());
  EXPECT_TRUE(eventually([&] { return isNoted("w1 has lost " + std::to_string(memberOf(0).session)); }));
}

TEST_F(DynamicMembersTest, ProcessThatTheKeeperDoesNotWantIsNotAdmitted) {
  join(0);
  RpcWorker& joining = join(1);
  announce(joining, "nobody");
  EXPECT_TRUE(eventually([&] { return isNoted("w0 refuses nobody"); }));
  EXPECT_TRUE(eventually([&] { return worker(0).parts.holds() == 0; }));
  EXPECT_EQ(namesOf(joining.group.unadmitted()), Names{"w0"});
  EXPECT_EQ(namesOf(worker(0).group.infos()), Names{"w0"});
}

TEST_F(DynamicMembersTest, MemberAnswersARepeatedJoinUnlessItHasLostTheWorker) {
  join(0);
  RpcWorker& joining = join(1);
  announce(joining, "1");
  ASSERT_TRUE(eventually([&] { return joining.group.unadmitted().empty(); }));
  announce(joining, "nobody");
  EXPECT_TRUE(eventually([&] { return joining.group.unadmitted().empty(); })) << "the keeper is not asked again";
  EXPECT_EQ(namesOf(joining.group.infos()), (Names{"w0", "w1"}));
  lose(worker(0), 1);
  announce(joining, "1");
  EXPECT_TRUE(eventually([&] { return joining.group.unadmitted().empty(); }));
  EXPECT_EQ(namesOf(joining.group.infos()), Names{"w1"});
  EXPECT_EQ(joining.peer(0).state(), State::kFailed) << "it has not ended";
}

TEST_F(DynamicMembersTest, KeeperHearsOfLostWorkersAndNotOfLeavingOnes) {
  RpcWorker& self = join(2);
  ASSERT_TRUE(self.peer(0).moveTo(State::kLeft, {ErrorCode::kShutDown, "left"}));
  self.group.onPeerGone(self.peer(0));
  lose(self, 1);
  EXPECT_TRUE(eventually([&] { return isNoted("w2 has lost " + std::to_string(memberOf(1).session)); }));
  EXPECT_FALSE(isNoted("w2 has lost " + std::to_string(memberOf(0).session)));
}

TEST_F(DynamicMembersTest, LeavingWorkerAnswersAndGetsNoNewRequests) {
  join(0);
  RpcWorker& leaving = join(1);
  announce(leaving, "1");
  ASSERT_TRUE(eventually([&] { return leaving.group.unadmitted().empty(); }));
  leaving.group.join(kPatience, kPatience);
  EXPECT_EQ(worker(0).peer(1).state(), State::kLeaving) << "it has acknowledged";
  const auto refused = rpcFailure(worker(0).call(1, "too late"));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind(), Kind::kWorkerLeft);
  EXPECT_TRUE(contains(refused->what(), "is leaving the group")) << refused->what();
  EXPECT_EQ(namesOf(worker(0).group.infos()), Names{"w0"});
}

TEST_F(DynamicMembersTest, LeavingThatTimesOutNamesTheSilentWorkers) {
  join(0);
  RpcWorker& leaving = join(1);
  announce(leaving, "1");
  ASSERT_TRUE(eventually([&] { return leaving.group.unadmitted().empty(); }));
  drop(wire::Kind::kLeave);
  const auto failed = rpcFailureOf([&] { leaving.group.join(milliseconds(0), milliseconds(20)); });
  ASSERT_TRUE(failed) << "a timeout of 0 is the default";
  EXPECT_EQ(failed->kind(), Kind::kBarrierFailed);
  EXPECT_STREQ(
      failed->what(),
      "worker 'w1' has tried to leave the group for 20 ms: 0 of its calls are open, and it has 0 requests to answer; "
      "not acknowledged by w0");
  isInterrupted_.store(true);
  EXPECT_THROW(leaving.group.join(kPatience, kPatience), Interrupted);
}

TEST_F(DynamicMembersTest, RemovedMemberHearsAGoodbyeAndIsForgotten) {
  join(0);
  RpcWorker& removed = join(1);
  announce(removed, "1");
  ASSERT_TRUE(eventually([&] { return removed.group.unadmitted().empty(); }));
  Peer& peer = worker(0).peer(1);
  worker(0).group.removeMember(memberOf(1).session);
  EXPECT_EQ(peer.state(), State::kLeft);
  EXPECT_TRUE(contains(peer.whyGone().message(), "has left the group"));
  EXPECT_EQ(worker(0).parts.directory.find("w1"), nullptr);
  EXPECT_TRUE(eventually([&] { return removed.peer(0).state() == State::kFailed; }))
      << "it may be waiting for this worker";
  worker(0).group.removeMember(memberOf(1).session); // a second time does nothing
  worker(0).group.removeMember(4711);
}

} // namespace
} // namespace torch_ucx_rpc
