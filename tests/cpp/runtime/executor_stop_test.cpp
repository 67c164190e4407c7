// The end of an executor: waiting tasks run or are dropped, and threads that still run user code are left behind.

#include "executor_fixture.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {
namespace {

class ExecutorStopTest : public ExecutorFixture {};

TEST_F(ExecutorStopTest, StopDropsRequestsThatWait) {
  start(1);
  blockRequests(1);
  std::atomic<bool> hasRun{false};
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = owned;
  threads_->addRequest([&hasRun, owned = std::move(owned)] { hasRun.store(true); });
  EXPECT_EQ(stop(std::chrono::milliseconds(50)), 1u);
  EXPECT_TRUE(watched.expired()) << "what a dropped request owned is released";
  gate_.open();
  EXPECT_EQ(stop(), 0u);
  EXPECT_FALSE(hasRun.load());
}

TEST_F(ExecutorStopTest, StopRunsCompletionsThatWait) {
  start(1);
  std::atomic<int> done{0};
  // They block all threads that are made freely. Further threads are made only after a while, so some completions wait.
  for (int count = 0; count < 5; ++count) {
    threads_->addCompletion([&] {
      gate_.pass();
      done.fetch_add(1);
    });
  }
  std::thread opener([&] {
    (void)eventually([&] { return gate_.waiting() != 0; });
    gate_.open();
  });
  EXPECT_EQ(stop(), 0u);
  opener.join();
  EXPECT_EQ(done.load(), 5) << "futures must be completed, on any thread";
}

TEST_F(ExecutorStopTest, CompletionAddedAfterStopIsRun) {
  start();
  EXPECT_EQ(stop(), 0u);
  threads_->addCompletion([this] { isDone_.store(true); });
  EXPECT_TRUE(eventually([&] { return isDone_.load(); }, std::chrono::seconds(1)))
      << "a future that hangs on it is never completed";
}

TEST_F(ExecutorStopTest, StopWaitsForThreadsThatOnlyNeedACore) {
  start();
  progress_.arrive([this] { gate_.pass(); }); // like a leader that gets no core
  ASSERT_TRUE(eventually([this] { return gate_.waiting() == 1; }));
  std::thread core([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    gate_.open();
  });
  EXPECT_EQ(stop(std::chrono::milliseconds(1)), 0u);
  core.join();
}

TEST_F(ExecutorStopTest, StopLeavesStuckThreadsBehindAndCountsThem) {
  start();
  blockRequests(3);
  EXPECT_EQ(stop(std::chrono::milliseconds(100)), 3u);
  gate_.open();
  EXPECT_TRUE(eventually([&] { return started_.load() == ended_.load(); })) << "they end when they return";
}

TEST_F(ExecutorStopTest, StuckThreadsMayOutliveTheirOwner) {
  start();
  blockRequests(2);
  EXPECT_EQ(stop(std::chrono::milliseconds(20)), 2u);
  threads_.reset();
  gate_.open();
  EXPECT_TRUE(eventually([&] { return started_.load() == ended_.load(); }));
}

TEST_F(ExecutorStopTest, SecondStopDoesNothing) {
  start();
  EXPECT_EQ(stop(), 0u);
  EXPECT_EQ(stop(), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
