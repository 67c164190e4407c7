// Barriers, and the two ways to end: join and shutdown.

#include "agent_fixture.h"

namespace torch_ucx_rpc {
namespace {

// Runs a function for all ranks at the same time.
void atOnce(const std::vector<worker_id_t>& ranks, const std::function<void(worker_id_t)>& function) {
  std::vector<std::thread> threads;
  for (const worker_id_t rank : ranks) {
    threads.emplace_back([&function, rank] { function(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(AgentTest, BarrierSumsOverAll) {
  start(4);
  atOnce({0, 1, 2, 3}, [&](worker_id_t rank) {
    for (int round = 0; round < 20; ++round) {
      EXPECT_EQ(agent(rank).group().barrier(rank + round, std::chrono::seconds(20)).sum, 6 + 4 * round);
    }
  });
}

TEST_F(AgentTest, BarrierThatTimesOutNamesTheMissing) {
  start(3);
  std::string what;
  atOnce({0, 2}, [&](worker_id_t rank) {
    try {
      (void)agent(rank).group().barrier(0, milliseconds(rank == 0 ? 3000 : 20'000));
      ADD_FAILURE();
    } catch (const std::exception& error) {
      if (rank == 0) {
        what = error.what();
        agent(2).shutdown();
      } else {
        EXPECT_TRUE(contains(error.what(), "was shut down")) << error.what();
      }
    }
  });
  EXPECT_TRUE(contains(what, "missing: worker 'w1' (rank 1")) << what;
  EXPECT_FALSE(contains(what, "'w2'")) << what;
}

TEST_F(AgentTest, BarrierCountsTheLivingAndNamesAWorkerThatDies) {
  start(3);
  atOnce({0, 1, 2}, [&](worker_id_t rank) {
    if (rank == 1) {
      (void)answer(call(1, 0, "known to both"));
      (void)answer(call(2, 1, "known to both"));
      (void)answer(call(0, 1, "known to both"));
      network_.kill("address 1");
      return;
    }
    const Barrier::Result result = agent(rank).group().barrier(1, std::chrono::seconds(20));
    EXPECT_EQ(result.sum, 2) << "rank " << rank;
    EXPECT_TRUE(contains(result.lost.message(), "worker 'w1'")) << result.lost.message();
  });
}

TEST_F(AgentTest, JoinWaitsForCallsInFlight) {
  start(3, echoBehindGate());
  const Future open = call(2, 1, "block");
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  std::atomic<int> joined{0};
  std::thread joiners([&] {
    atOnce({0, 1, 2}, [&](worker_id_t rank) {
      agent(rank).join(true, 20.f);
      EXPECT_TRUE(eventually([&] { return open->completed(); })) << rank; // an agent thread is about to complete it
      joined.fetch_add(1);
    });
  });
  EXPECT_EQ(textOf(*answer(call(0, 1, "still served"))), "still served");
  EXPECT_EQ(joined.load(), 0);
  gate_->open();
  joiners.join();
  EXPECT_EQ(joined.load(), 3);
}

TEST_F(AgentTest, JoinFollowsChainsOfCalls) {
  start(3, [this](Message& request) { // passes on a token without waiting, as RREF messages do
    const std::string text = textOf(request);
    const int left = std::stoi(text);
    if (left > 0) {
      (void)call(
          static_cast<worker_id_t>(left % 3), static_cast<worker_id_t>((left + 2) % 3), std::to_string(left - 1));
    }
    return completed(text);
  });
  for (worker_id_t rank = 0; rank < 3; ++rank) {
    // The handler of `left` runs at rank (left + 1 + 2) % 3 == left % 3.
    (void)call(rank, 0, "30");
  }
  atOnce({0, 1, 2}, [&](worker_id_t rank) { agent(rank).join(true, 20.f); });
  EXPECT_EQ(
      metric(0, "agent.calls_received") + metric(1, "agent.calls_received") + metric(2, "agent.calls_received"), 93u);
}

TEST_F(AgentTest, GracefulEndIsSilent) {
  start(3);
  for (worker_id_t from = 0; from < 3; ++from) {
    for (worker_id_t to = 0; to < 3; ++to) {
      (void)answer(call(from, to, "hello"));
    }
  }
  testing::internal::CaptureStderr();
  atOnce({0, 1, 2}, [&](worker_id_t rank) {
    agent(rank).join(true, 20.f);
    agent(rank).shutdown();
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(AgentTest, ShutdownFailsOpenCallsAndIsIdempotent) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future small = call(0, 1, "a", {}, 3600.f);
  const Future large = call(0, 1, "b", {tensorOf(4 * kMiB)}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 2; }));
  agent(0).shutdown();
  EXPECT_TRUE(contains(failure(small), "shut down on worker 'w0'"));
  EXPECT_TRUE(contains(failure(large), "shut down on worker 'w0'"));
  agent(0).shutdown();
  EXPECT_THROW((void)call(0, 1, "c"), std::exception);
}

TEST_F(AgentTest, ShutdownEndsAWaitingCaller) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future future = call(0, 1, "a", {}, 3600.f);
  std::thread waiter([&] { agent(0).calls().waitDriving(*future); });
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  agent(0).shutdown();
  waiter.join();
  EXPECT_TRUE(future->hasError());
}

TEST_F(AgentTest, ShutdownLeavesAStuckHandlerBehind) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future future = call(0, 1, "a");
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  agent(1).shutdown();
  const std::weak_ptr<UcxRpcAgent> stuck = agents_.at(1);
  agents_.erase(1);
  EXPECT_FALSE(stuck.expired()) << "it lives as long as its handler";
  gate_->open();
  EXPECT_TRUE(eventually([&] { return stuck.expired(); }));
}

TEST_F(AgentTest, AgentDroppedWithoutShutdownEndsInOrder) {
  start(2);
  EXPECT_EQ(textOf(*answer(call(0, 1, "a"))), "a");
  ASSERT_TRUE(eventually([&] { return agents_.at(0).use_count() == 1; })) << "no task holds it any more";
  agents_.erase(0);
  EXPECT_TRUE(eventually([&] {
    try {
      return contains(failure(call(1, 0, "b", {}, 3600.f)), "w0");
    } catch (const std::exception&) {
      return false;
    }
  }));
}

TEST_F(AgentTest, CallsUnderWayFromManyThreadsEndWithShutdown) {
  start(3);
  std::atomic<bool> isOver{false};
  std::atomic<int> unfinished{0};
  std::vector<std::thread> callers;
  for (int id = 0; id < 4; ++id) {
    callers.emplace_back([&, id] {
      const worker_id_t from = id % 3;
      while (!isOver.load()) {
        try {
          const Future future =
              call(from, static_cast<worker_id_t>((from + 1) % 3), "x", {tensorOf(id % 2 == 0 ? 10 : 100 * kKiB)});
          if (!eventually([&] { return future->completed(); })) {
            unfinished.fetch_add(1);
          }
        } catch (const std::exception&) {
          return; // the agent has shut down
        }
      }
    });
  }
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.calls_received") > 200; }));
  for (worker_id_t rank = 0; rank < 3; ++rank) {
    agent(rank).shutdown();
  }
  isOver.store(true);
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(unfinished.load(), 0);
}

} // namespace
} // namespace torch_ucx_rpc
