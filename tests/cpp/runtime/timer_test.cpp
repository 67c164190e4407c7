#include "runtime/timer.h"

#include "eventually.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Clock = Timer::Clock;
using std::chrono::milliseconds;

constexpr auto kNever = Clock::time_point::max();

TEST(TimerTest, CallsWhenItIsDueAndNotBefore) {
  std::atomic<int> calls{0};
  std::atomic<bool> isEarly{false};
  const Clock::time_point due = Clock::now() + milliseconds(30);
  Timer timer([&](Clock::time_point now) {
    isEarly.store(now < due);
    calls.fetch_add(1);
    return kNever;
  });
  timer.start();
  timer.dueBy(due);
  EXPECT_TRUE(eventually([&] { return calls.load() == 1; }));
  EXPECT_FALSE(isEarly.load());
}

TEST(TimerTest, EarlierDueTimeOvertakesALaterOne) {
  std::atomic<int> calls{0};
  Timer timer([&](Clock::time_point /*now*/) {
    calls.fetch_add(1);
    return kNever;
  });
  timer.start();
  timer.dueBy(Clock::now() + std::chrono::hours(1));
  timer.dueBy(Clock::now());
  EXPECT_TRUE(eventually([&] { return calls.load() == 1; }));
}

TEST(TimerTest, LaterDueTimeDoesNotDelayAnEarlierOne) {
  std::atomic<int> calls{0};
  Timer timer([&](Clock::time_point /*now*/) {
    calls.fetch_add(1);
    return kNever;
  });
  timer.dueBy(Clock::now()); // before it starts: kept
  timer.dueBy(Clock::now() + std::chrono::hours(1));
  timer.start();
  EXPECT_TRUE(eventually([&] { return calls.load() == 1; }));
}

TEST(TimerTest, ComesAgainWhenTheFunctionSaysSo) {
  std::atomic<int> calls{0};
  Timer timer([&](Clock::time_point now) { return calls.fetch_add(1) + 1 < 5 ? now + milliseconds(1) : kNever; });
  timer.start();
  timer.dueBy(Clock::now());
  EXPECT_TRUE(eventually([&] { return calls.load() == 5; }));
  timer.stop();
  EXPECT_EQ(calls.load(), 5);
}

TEST(TimerTest, DueTimeSetWhileTheFunctionRunsCounts) {
  std::atomic<int> calls{0};
  Timer* self = nullptr;
  Timer timer([&](Clock::time_point now) {
    if (calls.fetch_add(1) == 0) {
      self->dueBy(now + milliseconds(1));
    }
    return kNever;
  });
  self = &timer;
  timer.start();
  timer.dueBy(Clock::now());
  EXPECT_TRUE(eventually([&] { return calls.load() == 2; }));
}

TEST(TimerTest, StopEndsASleepThatWouldTakeForEver) {
  Timer timer([](Clock::time_point /*now*/) { return kNever; });
  timer.start();
  timer.stop();
  timer.stop();
}

TEST(TimerTest, StopWaitsForTheFunction) {
  std::atomic<bool> isInside{false};
  std::atomic<bool> isAllowed{false};
  std::atomic<bool> hasReturned{false};
  Timer timer([&](Clock::time_point /*now*/) {
    isInside.store(true);
    EXPECT_TRUE(eventually([&] { return isAllowed.load(); }));
    hasReturned.store(true);
    return kNever;
  });
  timer.start();
  timer.dueBy(Clock::now());
  ASSERT_TRUE(eventually([&] { return isInside.load(); }));
  std::thread stopper([&] {
    timer.stop();
    EXPECT_TRUE(hasReturned.load());
  });
  isAllowed.store(true);
  stopper.join();
}

TEST(TimerTest, NeverStartedCanBeStopped) {
  Timer timer([](Clock::time_point /*now*/) { return kNever; });
  timer.dueBy(Clock::now());
  timer.stop();
}

TEST(TimerTest, ManyThreadsSetItAndTheEarliestWins) {
  std::atomic<int> calls{0};
  Timer timer([&](Clock::time_point /*now*/) {
    calls.fetch_add(1);
    return kNever;
  });
  timer.start();
  std::vector<std::thread> threads;
  for (int id = 0; id < 8; ++id) {
    threads.emplace_back([&, id] {
      for (int step = 0; step < 500; ++step) {
        timer.dueBy(Clock::now() + std::chrono::hours(1 + (id + step) % 5));
      }
      if (id == 5) {
        timer.dueBy(Clock::now());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(eventually([&] { return calls.load() >= 1; }));
}

} // namespace
} // namespace torch_ucx_rpc
