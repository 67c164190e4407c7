// The threads that run tasks, their order, and how many run at once.

#include "executor_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Task = Executor::Task;

class ExecutorTest : public ExecutorFixture {};

TEST_F(ExecutorTest, RunsTasksOfTheLeader) {
  start();
  std::atomic<int> requests{0};
  std::atomic<int> completions{0};
  for (int count = 0; count < 1000; ++count) {
    progress_.arrive([&] {
      threads_->addRequest([&] {
        EXPECT_FALSE(Executor::isLeader());
        requests.fetch_add(1);
      });
      threads_->addCompletion([&] {
        EXPECT_FALSE(Executor::isLeader());
        completions.fetch_add(1);
      });
    });
  }
  EXPECT_TRUE(eventually([&] { return requests.load() == 1000 && completions.load() == 1000; }));
}

TEST_F(ExecutorTest, RunsTasksOfOtherThreads) {
  start();
  std::atomic<int> done{0};
  std::vector<std::thread> adders;
  for (int id = 0; id < 4; ++id) {
    adders.emplace_back([&] {
      for (int count = 0; count < 500; ++count) {
        threads_->addRequest([&] { done.fetch_add(1); });
        threads_->addCompletion([&] { done.fetch_add(1); });
      }
    });
  }
  for (std::thread& adder : adders) {
    adder.join();
  }
  EXPECT_TRUE(eventually([&] { return done.load() == 4000; }));
}

// A peer may be found dead before threads have started.
TEST_F(ExecutorTest, TaskAddedBeforeTheStartRunsAfterIt) {
  make();
  std::atomic<int> run{0};
  std::atomic<bool> isStarted{false};
  const auto task = [&] {
    EXPECT_TRUE(isStarted.load());
    run.fetch_add(1);
  };
  threads_->addRequest(task);
  threads_->addCompletion(task);
  threads_->addFailure(task);
  EXPECT_EQ(threads_->counts().threads, 0u);
  timer_.start();
  isStarted = true;
  threads_->start(progress_);
  EXPECT_TRUE(eventually([&] { return run.load() == 3; }));
}

TEST_F(ExecutorTest, RequestsAreBegunInOrder) {
  start(1);
  std::vector<int> order; // one request at a time: no lock needed
  std::atomic<int> done{0};
  progress_.arrive([&] {
    for (int number = 0; number < 200; ++number) {
      threads_->addRequest([&, number] {
        order.push_back(number);
        done.fetch_add(1);
      });
    }
  });
  ASSERT_TRUE(eventually([&] { return done.load() == 200; }));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(ExecutorTest, AtMostTheSetNumberOfRequestsRunAtOnce) {
  start(3);
  blockRequests(3);
  std::atomic<int> later{0};
  for (int count = 0; count < 5; ++count) {
    threads_->addRequest([&] { later.fetch_add(1); });
  }
  // Completions that begin and end let no further request start.
  std::atomic<int> completions{0};
  for (int count = 0; count < 50; ++count) {
    progress_.arrive([&] { threads_->addCompletion([&] { completions.fetch_add(1); }); });
  }
  ASSERT_TRUE(eventually([&] { return completions.load() == 50; }));
  EXPECT_EQ(later.load(), 0);
  EXPECT_EQ(threads_->counts().runningRequests, 3u);
  EXPECT_EQ(threads_->counts().waitingRequests, 5u);
  gate_.open();
  EXPECT_TRUE(eventually([&] { return later.load() == 5; }));
}

TEST_F(ExecutorTest, RequestsThatWaitForCallsOfTheirOwnMakeRoomForOthers) {
  constexpr size_t kDepth = 100;
  start(2, kDepth);
  // Each request waits for the next one.
  std::vector<std::shared_ptr<Gate>> gates;
  for (size_t level = 0; level <= kDepth; ++level) {
    gates.push_back(std::make_shared<Gate>());
  }
  std::atomic<size_t> ended{0};
  std::function<void(size_t)> add = [&](size_t level) {
    threads_->addRequest([&, level] {
      if (level + 1 < kDepth) {
        const std::shared_ptr<void> call = Executor::markBlocked();
        add(level + 1);
        gates[level + 1]->pass();
      }
      ended.fetch_add(1);
      gates[level]->open();
    });
  };
  add(0);
  EXPECT_TRUE(eventually([&] { return ended.load() == kDepth; })) << ended.load();
  EXPECT_TRUE(eventually([&] { return threads_->counts().runningRequests == 0; }));
  EXPECT_EQ(threads_->counts().nestingRequests, 0u);
}

TEST_F(ExecutorTest, CallsThatOutliveTheirRequestDoNotCountAsNesting) {
  start(1);
  std::shared_ptr<void> call;
  threads_->addRequest([&] {
    call = Executor::markBlocked();
    isDone_.store(true);
  });
  EXPECT_TRUE(eventually([&] { return isDone_.load() && threads_->counts().runningRequests == 0; }));
  EXPECT_EQ(threads_->counts().nestingRequests, 0u);
  blockRequests(1);
  call.reset();
  EXPECT_EQ(threads_->counts().nestingRequests, 0u);
  EXPECT_TRUE(Executor::markBlocked() == nullptr) << "this thread runs no request";
}

TEST_F(ExecutorTest, RequestIsRefusedWhenAsManyAsMayRunWaitForCalls) {
  start(2, 4);
  for (int request = 0; request < 4; ++request) {
    threads_->addRequest([this] {
      const std::shared_ptr<void> call = Executor::markBlocked();
      gate_.pass();
    });
  }
  ASSERT_TRUE(eventually([this] { return threads_->counts().nestingRequests == 4; }));
  std::atomic<bool> isRun{false};
  std::atomic<bool> isRefused{false};
  threads_->addRequest([&] { isRun.store(true); }, [&] { isRefused.store(true); });
  EXPECT_TRUE(eventually([&] { return isRefused.load(); }));
  EXPECT_FALSE(isRun.load());
  EXPECT_EQ(threads_->counts().waitingRequests, 0u);
}

TEST_F(ExecutorTest, FollowUpRunsAfterItsTask) {
  start();
  std::vector<int> order; // one thread writes it
  struct AtEnd {
    std::vector<int>& order;
    ~AtEnd() {
      order.push_back(2);
    }
  };
  auto owned = std::make_unique<AtEnd>(order);
  threads_->addRequest([&, owned = std::move(owned)] {
    EXPECT_TRUE(Executor::isInTask());
    Executor::runAfterTask([&] {
      order.push_back(3);
      isDone_.store(true);
    });
    order.push_back(1);
  });
  EXPECT_TRUE(eventually([this] { return isDone_.load(); }));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_FALSE(Executor::isInTask()) << "this thread is none of the agent's";
}

TEST_F(ExecutorTest, HooksRunOnlyForTasksThatAskForThem) {
  start();
  ASSERT_TRUE(eventually([this] { return progress_.isLed(); }));
  std::atomic<int> done{0};
  progress_.arrive([&] {
    threads_->addRequest([&] { done.fetch_add(1); });
    threads_->addCompletion([&] { done.fetch_add(1); });
  });
  ASSERT_TRUE(eventually([&] { return done.load() == 2; }));
  EXPECT_EQ(started_.load(), 0) << "neither a thread that leads nor one that runs TorchScript must wait for Python";
  progress_.arrive([this] {
    threads_->addRequest([this] {
      Executor::runHooks();
      Executor::runHooks();
      EXPECT_EQ(started_.load(), 1);
      isDone_.store(true);
    });
  });
  EXPECT_TRUE(eventually([this] { return isDone_.load(); }));
  Executor::runHooks();
  EXPECT_EQ(started_.load(), 1) << "this thread is none of the agent's";
}

TEST_F(ExecutorTest, BlockedRequestsDoNotKeepAllowedRequestsFromRunning) {
  start();
  blockRequests(kMaxRequests);
  EXPECT_TRUE(eventually([&] { return progress_.isLed(); }));
}

TEST_F(ExecutorTest, CompletionThatArrivesDoesNotWaitBehindBlockedRequests) {
  start();
  blockRequests(kMaxRequests);
  std::atomic<bool> isDone{false};
  progress_.arrive([&] { threads_->addCompletion([&] { isDone.store(true); }); });
  EXPECT_TRUE(eventually([&] { return isDone.load(); }, std::chrono::seconds(5)));
}

// A timer, or a thread that calls its own worker, adds tasks while the leader sleeps and all other threads are blocked.
class ExecutorBlockedTest : public ExecutorTest, public testing::WithParamInterface<size_t> {};

TEST_P(ExecutorBlockedTest, CompletionAddedFromOutsideDoesNotWait) {
  start();
  blockRequests(GetParam());
  ASSERT_TRUE(eventually([&] { return progress_.isLed(); }));
  threads_->addCompletion([this] { isDone_.store(true); });
  EXPECT_TRUE(eventually([&] { return isDone_.load(); }, std::chrono::seconds(5)));
}

INSTANTIATE_TEST_SUITE_P(Requests, ExecutorBlockedTest, testing::Values(1, 2, 3, 4, 8, 12));

TEST_F(ExecutorTest, RequestAddedFromOutsideDoesNotWaitForBlockedOnes) {
  start();
  blockRequests(kMaxRequests - 1);
  ASSERT_TRUE(eventually([&] { return progress_.isLed(); }));
  threads_->addRequest([this] { isDone_.store(true); });
  EXPECT_TRUE(eventually([&] { return isDone_.load(); }, std::chrono::seconds(5)));
}

// In this chain each request waits for a later one. It ends only if one thread can always lead and another can run.
TEST_F(ExecutorTest, RequestsThatWaitForLaterOnesAreServed) {
  start();
  std::vector<Gate> gates(kMaxRequests);
  std::atomic<size_t> done{0};
  for (size_t number = 0; number < kMaxRequests; ++number) {
    progress_.arrive([&, number] {
      threads_->addRequest([&, number] {
        if (number + 1 < kMaxRequests) {
          gates[number].pass();
        }
        if (number > 0) {
          gates[number - 1].open();
        }
        done.fetch_add(1);
      });
    });
  }
  EXPECT_TRUE(eventually([&] { return done.load() == kMaxRequests; }));
  for (Gate& gate : gates) {
    gate.open();
  }
}

TEST_F(ExecutorTest, AThreadLeadsWhileTasksRun) {
  start();
  for (size_t blocked = 1; blocked <= kMaxRequests; ++blocked) {
    progress_.arrive([this] { threads_->addRequest([this] { gate_.pass(); }); });
    ASSERT_TRUE(eventually([&] { return gate_.waiting() == blocked && progress_.isLed(); })) << blocked;
  }
}

TEST_F(ExecutorTest, CompletionsThatBlockLeaveAThreadForFailures) {
  constexpr size_t kMaxTasks = 1 + 4; // one request, and completions up to the nesting limit
  start(1, 4);
  for (size_t count = 0; count < 20; ++count) {
    threads_->addCompletion([this] { gate_.pass(); });
  }
  ASSERT_TRUE(eventually([&] { return gate_.waiting() == kMaxTasks; })) << gate_.waiting();
  threads_->addFailure([this] { isDone_.store(true); });
  EXPECT_TRUE(eventually([this] { return isDone_.load(); })) << "a deadline behind callbacks that block";
  EXPECT_EQ(gate_.waiting(), kMaxTasks) << "the thread for failures begins nothing else";
  gate_.open();
  EXPECT_TRUE(eventually([this] { return gate_.waiting() == 0; }));
}

TEST_F(ExecutorTest, FailuresComeBeforeOtherTasks) {
  start(1, 1);
  blockRequests(1); // leaves one thread for other tasks
  std::vector<int> order;
  std::mutex mutex;
  const auto note = [&](int what) {
    const std::lock_guard lock(mutex);
    order.push_back(what);
  };
  progress_.arrive([&] {
    threads_->addRequest([&] { note(3); });
    threads_->addCompletion([&] { note(2); });
    threads_->addFailure([&] { note(1); });
  });
  const auto noted = [&] {
    const std::lock_guard lock(mutex);
    return order.size();
  };
  EXPECT_TRUE(eventually([&] { return noted() == 2; }));
  gate_.open();
  EXPECT_TRUE(eventually([&] { return noted() == 3; }));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST_F(ExecutorTest, ThreadsStayWithinTheirBound) {
  start(4, 4);
  std::atomic<int> done{0};
  for (int count = 0; count < 2000; ++count) {
    progress_.arrive([&] {
      threads_->addRequest([&] {
        Executor::runHooks();
        done.fetch_add(1);
      });
      threads_->addCompletion([&] {
        Executor::runHooks();
        done.fetch_add(1);
      });
    });
    EXPECT_LE(threads_->counts().threads, 2u * 4 + 3);
  }
  EXPECT_TRUE(eventually([&] { return done.load() == 4000; }));
  EXPECT_LE(started_.load(), 2 * 4 + 3);
}

TEST_F(ExecutorTest, ThreadsOfABurstEndWhenTheyAreSpare) {
  start(kMaxRequests, kMaxRequests, std::chrono::milliseconds(1));
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t kept = std::min(kMaxRequests, cores) + Executor::kMaxLeaders;
  for (int burst = 0; burst < 3; ++burst) {
    blockRequests(kMaxRequests);
    EXPECT_GT(threads_->counts().threads, kMaxRequests);
    gate_.open();
    EXPECT_TRUE(eventually([&] { return gate_.waiting() == 0 && threads_->counts().threads <= kept; }));
    gate_.close();
  }
}

// On busy cores a new thread takes a while to begin. Tasks that wait for it must not start further threads.
TEST_F(ExecutorTest, NoThreadsAreMadeWhileOthersAreAboutToBegin) {
  std::atomic<bool> isOver{false};
  std::vector<std::thread> busy;
  for (unsigned core = 0; core < 8 * std::max(1u, std::thread::hardware_concurrency()); ++core) {
    busy.emplace_back([&] {
      while (!isOver.load()) {
      }
    });
  }
  start(4, 64);
  for (int count = 0; count < 50; ++count) {
    threads_->addRequest([this] { gate_.pass(); });
  }
  EXPECT_TRUE(eventually([this] { return gate_.waiting() == 4; }));
  EXPECT_LE(threads_->counts().threads, 2u * 4 + 3);
  gate_.open();
  isOver.store(true);
  for (std::thread& thread : busy) {
    thread.join();
  }
}

// A task may own this object, whose destruction adds another task.
class AddsOnDestruction {
 public:
  AddsOnDestruction(Executor& threads, std::atomic<bool>& isDone) : threads_(threads), isDone_(isDone) {}
  AddsOnDestruction(const AddsOnDestruction&) = delete;
  AddsOnDestruction& operator=(const AddsOnDestruction&) = delete;
  ~AddsOnDestruction() {
    threads_.addCompletion([&isDone = isDone_] { isDone.store(true); });
  }

 private:
  Executor& threads_;
  std::atomic<bool>& isDone_;
};

TEST_F(ExecutorTest, TaskIsDestroyedWithoutAnyLock) {
  start();
  threads_->addRequest([owned = std::make_unique<AddsOnDestruction>(*threads_, isDone_)] {});
  EXPECT_TRUE(eventually([&] { return isDone_.load(); }));
}

TEST_F(ExecutorTest, RefusedRequestIsDestroyedWithoutAnyLock) {
  start(1, 1);
  threads_->addRequest([this] {
    const std::shared_ptr<void> call = Executor::markBlocked();
    gate_.pass();
  });
  ASSERT_TRUE(eventually([this] { return threads_->counts().nestingRequests == 1; }));
  threads_->addRequest([owned = std::make_unique<AddsOnDestruction>(*threads_, isDone_)] {}, [] {});
  EXPECT_TRUE(eventually([&] { return isDone_.load(); }));
}

} // namespace
} // namespace torch_ucx_rpc
