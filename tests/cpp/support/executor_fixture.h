#pragma once

#include "eventually.h"
#include "gate.h"
#include "runtime/executor.h"
#include "runtime/timer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Replaces Progress: sleeps in lead() until something is delivered, or until it is woken.
class FakeProgress final : public Leader {
 public:
  bool lead() override {
    EXPECT_TRUE(Executor::isLeader());
    EXPECT_LT(leaders_.fetch_add(1), static_cast<int>(Executor::kMaxLeaders));
    std::vector<Executor::Task> delivered;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return isWoken_ || !delivered_.empty(); });
      isWoken_ = false;
      delivered.swap(delivered_);
    }
    for (Executor::Task& deliver : delivered) {
      deliver();
    }
    leaders_.fetch_sub(1);
    return true;
  }
  // Makes something arrive: the leader runs `deliver`, which adds tasks.
  void arrive(Executor::Task deliver) {
    const std::lock_guard lock(mutex_);
    delivered_.push_back(std::move(deliver));
    changed_.notify_all();
  }
  void wake() {
    const std::lock_guard lock(mutex_);
    isWoken_ = true;
    changed_.notify_all();
  }
  bool isLed() const {
    return leaders_.load() != 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool isWoken_ = false;
  std::vector<Executor::Task> delivered_;
  std::atomic<int> leaders_{0};
};

// An executor whose leader is a FakeProgress.
class ExecutorFixture : public testing::Test {
 protected:
  // On a machine with fewer cores, both rules for new threads apply.
  static constexpr size_t kMaxRequests = 12;

  void start(
      size_t maxRequests = kMaxRequests,
      size_t nestingLimit = kMaxRequests,
      Executor::Clock::duration spareAfter = Executor::kSpareAfter) {
    make(maxRequests, nestingLimit, spareAfter);
    timer_.start();
    threads_->start(progress_);
  }

  void make(
      size_t maxRequests = kMaxRequests,
      size_t nestingLimit = kMaxRequests,
      Executor::Clock::duration spareAfter = Executor::kSpareAfter) {
    threads_ = std::make_shared<Executor>(
        maxRequests,
        nestingLimit,
        ThreadHooks{[this] { started_.fetch_add(1); }, [this] { ended_.fetch_add(1); }},
        timer_,
        spareAfter);
  }

  void TearDown() override {
    gate_.open();
    if (threads_ != nullptr) {
      EXPECT_EQ(stop(), 0u);
      EXPECT_EQ(started_.load(), ended_.load()) << "a hook for the end of each thread that began";
    }
  }

  size_t stop(std::chrono::milliseconds limit = kPatience) {
    timer_.stop();
    return threads_->stop(limit, [this] { progress_.wake(); });
  }

  // Blocks `count` requests, and waits until they do.
  void blockRequests(size_t count) {
    progress_.arrive([this, count] {
      for (size_t request = 0; request < count; ++request) {
        threads_->addRequest([this] {
          Executor::runHooks();
          gate_.pass();
        });
      }
    });
    ASSERT_TRUE(eventually([this, count] { return gate_.waiting() == count; }))
        << gate_.waiting() << " of " << count << " requests run";
  }

  Gate gate_;
  FakeProgress progress_;
  std::atomic<bool> isDone_{false}; // set by tasks that may outlast a failing test's body
  std::atomic<int> started_{0};
  std::atomic<int> ended_{0};
  Timer timer_;
  std::shared_ptr<Executor> threads_;
};

} // namespace torch_ucx_rpc
