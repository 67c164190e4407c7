// Groups that workers join and leave.

#include "agent_fixture.h"

namespace torch_ucx_rpc {
namespace {

class DynamicGroupTest : public AgentTest {
 protected:
  // Starts a worker that knows `known`, and waits until they admit it.
  void join(worker_id_t rank, const std::vector<worker_id_t>& known, const Handler& handler = &echo) {
    agents_[rank] = makeAgent(rank, handler);
    UcxRpcAgent& joining = agent(rank);
    joining.group().setMembership(
        {[this, rank](const std::string& record) { admit(rank, record); },
         [this, rank](uint64_t session) {
           const std::lock_guard lock(mutex_);
           lost_[rank].push_back(session);
         }});
    std::vector<Member> members{selfOf(rank)};
    std::vector<uint64_t> sessions;
    for (const worker_id_t other : known) {
      members.push_back(selfOf(other));
      sessions.push_back(agent(other).session());
    }
    joining.group().addMembers(members);
    joining.start();
    joining.group().announceJoin(std::to_string(rank), sessions);
  }

  Member selfOf(worker_id_t rank) {
    return memberOf(rank, agent(rank).session(), agent(rank).address());
  }

  bool isAdmitted(worker_id_t rank) {
    return eventually([&] { return agent(rank).group().unadmitted().empty(); });
  }

  std::vector<uint64_t> lostBy(worker_id_t rank) {
    const std::lock_guard lock(mutex_);
    return lost_[rank];
  }

  std::string refused_; // no worker admits this record
  std::function<void()> admission_ = [] {}; // runs before a worker admits another

 private:
  void admit(worker_id_t rank, const std::string& record) {
    admission_();
    if (record == refused_) {
      throw std::runtime_error("nobody knows " + record);
    }
    agent(rank).group().addMembers({selfOf(std::stoi(record))});
  }

  std::mutex mutex_;
  std::map<worker_id_t, std::vector<uint64_t>> lost_; // guarded by mutex_
};

TEST_F(DynamicGroupTest, WorkerThatJoinsIsKnownToTheOthersOnceTheyAcknowledge) {
  join(0, {});
  EXPECT_TRUE(isAdmitted(0));
  join(1, {0});
  ASSERT_TRUE(isAdmitted(1));
  EXPECT_EQ(textOf(*answer(call(0, 1, "to the new one"))), "to the new one");
  join(2, {0, 1});
  ASSERT_TRUE(isAdmitted(2));
  for (worker_id_t from = 0; from < 3; ++from) {
    EXPECT_EQ(agent(from).getWorkerInfos().size(), 3u);
    for (worker_id_t to = 0; to < 3; ++to) {
      EXPECT_EQ(textOf(*answer(call(from, to, "all pairs"))), "all pairs");
    }
  }
}

TEST_F(DynamicGroupTest, WorkerThatIsNotAdmittedWaits) {
  join(0, {});
  refused_ = "1";
  join(1, {0});
  EXPECT_FALSE(eventually([&] { return agent(1).group().unadmitted().empty(); }, milliseconds(200)));
  ASSERT_EQ(agent(1).group().unadmitted().size(), 1u);
  EXPECT_EQ(agent(1).group().unadmitted()[0].name_, "w0");
  EXPECT_EQ(agent(0).getWorkerInfos().size(), 1u);
}

TEST_F(DynamicGroupTest, CallsOfAWorkerThatIsNotAdmittedYetWait) {
  const std::shared_ptr<Gate> gate = gate_;
  join(0, {});
  admission_ = [gate] { gate->pass(); };
  join(1, {0});
  // A member that has admitted the worker may ask it to call a member that has not.
  const Future small = call(1, 0, "small");
  const Future large = call(1, 0, "large", {tensorOf(kMiB)});
  EXPECT_FALSE(eventually([&] { return small->completed() || large->completed(); }, milliseconds(200)));
  gate_->open();
  EXPECT_EQ(textOf(*answer(small)), "small");
  EXPECT_EQ(textOf(*answer(large)), "large");
  EXPECT_EQ(metric(0, "agent.frames_refused"), 0u);
}

TEST_F(DynamicGroupTest, CallsToAWorkerThatDiesBeforeItAdmitsTheCallerFail) {
  join(0, {});
  refused_ = "1";
  join(1, {0});
  const Future future = call(1, 0, "?", {tensorOf(kMiB)});
  network_.kill(agent(0).address());
  EXPECT_TRUE(contains(failure(future), "w0"));
}

TEST_F(DynamicGroupTest, StaticGroupsAdmitNoWorker) {
  start(2);
  agents_[2] = makeAgent(2, &echo);
  agent(2).group().setMembership({[](const std::string& /*record*/) {}, [](uint64_t /*session*/) {}});
  agent(2).group().addMembers({selfOf(2), selfOf(0)});
  agent(2).start();
  agent(2).group().announceJoin("2", {agent(0).session()});
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 1; }));
  EXPECT_EQ(agent(2).group().unadmitted().size(), 1u);
  EXPECT_THROW((void)agent(0).getWorkerInfo(2), std::runtime_error);
}

TEST_F(DynamicGroupTest, LeavingWorkerAnswersEarlierRequestsAndGetsNoNewOnes) {
  const std::shared_ptr<Gate> gate = gate_;
  join(0, {});
  join(1, {0}, [gate](Message& request) {
    gate->pass();
    return echo(request);
  });
  ASSERT_TRUE(isAdmitted(1));
  const Future before = call(0, 1, "before");
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.server_active_calls") == 1; }));
  std::atomic<bool> hasLeft{false};
  std::thread leaver([&] {
    agent(1).join(true, 0);
    hasLeft.store(true);
    agent(1).shutdown();
  });
  std::string error;
  EXPECT_TRUE(eventually([&] { // until worker 0 knows that 1 leaves
    const Future after = call(0, 1, "after");
    if (!eventually([&] { return after->completed(); }, milliseconds(50))) {
      return false;
    }
    error = after->hasError() ? after->tryRetrieveErrorMessage() : "";
    return true;
  }));
  EXPECT_TRUE(contains(error, "worker 'w1'") && contains(error, "is leaving the group")) << error;
  EXPECT_FALSE(before->completed());
  EXPECT_FALSE(hasLeft.load());
  EXPECT_EQ(agent(0).getWorkerInfos().size(), 1u);
  gate_->open();
  EXPECT_EQ(textOf(*answer(before)), "before");
  leaver.join();
  // The last answer may arrive before the goodbye.
  EXPECT_TRUE(eventually([&] { return contains(failure(call(0, 1, "later")), "shut down"); }));
  EXPECT_TRUE(lostBy(0).empty()) << "a worker that leaves in good order is not lost";
}

TEST_F(DynamicGroupTest, LeavingEndsAtItsTimeoutAndNamesTheSilentWorkers) {
  join(0, {});
  join(1, {0});
  ASSERT_TRUE(isAdmitted(1));
  fault(wire::Kind::kLeave, 1, Fate::kDrop);
  try {
    agent(1).join(true, 0.1f);
    ADD_FAILURE();
  } catch (const std::runtime_error& error) {
    EXPECT_TRUE(contains(error.what(), "not acknowledged by w0")) << error.what();
  }
}

TEST_F(DynamicGroupTest, WaitForOthersWhileLeavingCanBeInterrupted) {
  join(0, {});
  join(1, {0});
  ASSERT_TRUE(isAdmitted(1));
  fault(wire::Kind::kLeave, 1, Fate::kDrop);
  isInterrupted_.store(true);
  EXPECT_THROW(agent(1).join(true, 0), Interrupted);
}

TEST_F(DynamicGroupTest, AllCanLeaveAtOnce) {
  for (worker_id_t rank = 0; rank < 4; ++rank) {
    std::vector<worker_id_t> earlier;
    for (worker_id_t other = 0; other < rank; ++other) {
      earlier.push_back(other);
    }
    join(rank, earlier);
    ASSERT_TRUE(isAdmitted(rank));
  }
  std::vector<std::thread> leavers;
  for (worker_id_t rank = 0; rank < 4; ++rank) {
    leavers.emplace_back([this, rank] {
      agent(rank).join(true, 20);
      agent(rank).shutdown();
    });
  }
  for (std::thread& leaver : leavers) {
    leaver.join();
  }
}

TEST_F(DynamicGroupTest, WorkerThatIsLostIsReportedAndItsPlaceCanBeTaken) {
  join(0, {});
  join(1, {0}, [](Message& /*request*/) { return completed("first life"); });
  ASSERT_TRUE(isAdmitted(1));
  EXPECT_EQ(textOf(*answer(call(0, 1, "?"))), "first life");
  const uint64_t session = agent(1).session();
  network_.kill(agent(1).address());
  (void)failure(call(0, 1, "?"));
  ASSERT_TRUE(eventually([&] { return lostBy(0) == std::vector<uint64_t>{session}; }));
  EXPECT_EQ(agent(0).getWorkerInfos().size(), 1u);
  agent(1).shutdown(); // ends the agent before another one takes its address
  agents_.erase(1);
  join(1, {0}, [](Message& /*request*/) { return completed("second life"); });
  ASSERT_TRUE(isAdmitted(1));
  EXPECT_EQ(textOf(*answer(call(0, 1, "?"))), "second life");
  EXPECT_EQ(textOf(*answer(call(1, 0, "?"))), "?");
}

TEST_F(DynamicGroupTest, WorkerThatLeftCanBeReplaced) {
  join(0, {});
  join(1, {0});
  ASSERT_TRUE(isAdmitted(1));
  agent(1).shutdown();
  ASSERT_TRUE(contains(failure(call(0, 1, "gone")), "w1"));
  agents_.erase(1);
  join(1, {0}, [](Message& /*request*/) { return completed("second life"); });
  ASSERT_TRUE(isAdmitted(1));
  EXPECT_EQ(textOf(*answer(call(0, 1, "?"))), "second life");
}

TEST_F(DynamicGroupTest, MemberThatIsRemovedIsNotWaitedFor) {
  join(0, {});
  refused_ = "1";
  join(1, {0});
  const Future future = call(1, 0, "?");
  agent(1).group().removeMember(agent(0).session());
  EXPECT_TRUE(agent(1).group().unadmitted().empty());
  EXPECT_TRUE(contains(failure(future), "has left the group"));
  EXPECT_THROW((void)agent(1).getWorkerInfo(0), std::runtime_error);
}

} // namespace
} // namespace torch_ucx_rpc
