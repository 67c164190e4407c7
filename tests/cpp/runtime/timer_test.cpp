#include "runtime/timer.h"

#include "eventually.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Clock = Timer::Clock;
using TimePoint = Timer::TimePoint;
using std::chrono::hours;
using std::chrono::milliseconds;

// ----------------------------------------------------------------------------------------- tasks, by a fake clock

class TimerTasksTest : public testing::Test {
 protected:
  // Adds a task that notes its runs, and runs again after `period`. Zero means that it does not run again.
  Timer::Task& add(const std::string& name, milliseconds period = milliseconds(0)) {
    return timer_.add([this, name, period](TimePoint now) {
      EXPECT_EQ(now, now_);
      ran_.push_back(name);
      return period.count() != 0 ? now + period : Timer::kNever;
    });
  }

  // Lets `time` pass, and returns the names of the tasks that ran.
  std::vector<std::string> after(milliseconds time) {
    now_ += time;
    ran_.clear();
    next_ = timer_.runDue(now_);
    return ran_;
  }

  using Names = std::vector<std::string>;

  TimePoint now_ = Clock::now();
  TimePoint next_{};
  Names ran_;
  Timer timer_{[this] { return now_; }};
};

TEST_F(TimerTasksTest, TaskRunsWhenItIsDueAndNotBefore) {
  Timer::Task& task = add("task");
  EXPECT_EQ(after(hours(1)), Names{}) << "no run was asked for";
  EXPECT_EQ(next_, Timer::kNever);
  task.dueIn(milliseconds(30));
  EXPECT_EQ(after(milliseconds(29)), Names{});
  EXPECT_EQ(next_, now_ + milliseconds(1));
  EXPECT_EQ(after(milliseconds(1)), Names{"task"});
  EXPECT_EQ(next_, Timer::kNever);
  EXPECT_EQ(after(hours(1)), Names{}) << "once";
}

TEST_F(TimerTasksTest, EarlierDueTimeWins) {
  Timer::Task& task = add("task");
  task.dueIn(hours(1));
  task.dueIn(milliseconds(5));
  task.dueIn(hours(2));
  EXPECT_EQ(after(milliseconds(5)), Names{"task"});
  EXPECT_EQ(after(hours(3)), Names{}) << "the later times are gone with the run";
}

TEST_F(TimerTasksTest, TaskRunsAgainAtTheTimeThatItReturns) {
  add("task", milliseconds(10)).dueNow();
  EXPECT_EQ(after(milliseconds(0)), Names{"task"});
  EXPECT_EQ(after(milliseconds(9)), Names{});
  EXPECT_EQ(after(milliseconds(1)), Names{"task"});
  EXPECT_EQ(after(milliseconds(100)), Names{"task"}) << "a late run is one run";
}

TEST_F(TimerTasksTest, TasksKeepTheirOwnTimes) {
  Timer::Task& fast = add("fast", milliseconds(10));
  Timer::Task& slow = add("slow", milliseconds(25));
  slow.dueNow();
  fast.dueNow();
  EXPECT_EQ(after(milliseconds(0)), (Names{"fast", "slow"})) << "in the order in which they were added";
  EXPECT_EQ(after(milliseconds(10)), Names{"fast"});
  EXPECT_EQ(after(milliseconds(15)), (Names{"fast", "slow"}));
  EXPECT_EQ(next_, now_ + milliseconds(10));
}

TEST_F(TimerTasksTest, DueTimeSetWhileTheTaskRunsCounts) {
  Timer::Task* self = nullptr;
  int runs = 0;
  self = &timer_.add([&](TimePoint /*now*/) {
    if (++runs == 1) {
      self->dueIn(milliseconds(1));
    }
    return Timer::kNever;
  });
  self->dueNow();
  after(milliseconds(0));
  after(milliseconds(1));
  EXPECT_EQ(runs, 2);
}

TEST_F(TimerTasksTest, TaskMayMakeAnotherTaskDue) {
  Timer::Task& second = add("second");
  timer_
      .add([&](TimePoint /*now*/) {
        second.dueNow();
        return Timer::kNever;
      })
      .dueNow();
  EXPECT_EQ(after(milliseconds(0)), Names{}) << "it had been looked at before";
  EXPECT_EQ(next_, now_);
  EXPECT_EQ(after(milliseconds(0)), Names{"second"});
}

// ----------------------------------------------------------------------------------------------------- the thread

// A timer with a task that counts its runs, and notes the time of the last one.
class TimerTest : public testing::Test {
 protected:
  ~TimerTest() override {
    timer_.stop();
  }

  std::atomic<int> runs_{0};
  std::atomic<TimePoint> ranAt_{};
  Timer timer_;
  Timer::Task& task_ = timer_.add([this](TimePoint now) {
    ranAt_.store(now);
    runs_.fetch_add(1);
    return Timer::kNever;
  });
};

TEST_F(TimerTest, ThreadWakesForAnEarlierTime) {
  timer_.start();
  task_.dueIn(hours(1));
  const TimePoint due = Clock::now() + milliseconds(20);
  task_.dueBy(due);
  EXPECT_TRUE(eventually([&] { return runs_.load() == 1; }));
  EXPECT_GE(ranAt_.load(), due);
}

TEST_F(TimerTest, DueTimeFromBeforeTheStartCounts) {
  task_.dueNow();
  timer_.start();
  EXPECT_TRUE(eventually([&] { return runs_.load() == 1; }));
}

TEST_F(TimerTest, StopEndsASleepThatWouldTakeForEver) {
  timer_.start();
  timer_.stop();
  timer_.stop();
}

// By default Linux may wake a thread 50 us late. The timer asks devices every 50 us.
TEST_F(TimerTest, ThreadIsWokenInTime) {
  std::atomic<int> slackNs{0};
  Timer::Task& task = timer_.add([&](TimePoint /*now*/) {
    slackNs.store(prctl(PR_GET_TIMERSLACK));
    return Timer::kNever;
  });
  timer_.start();
  task.dueNow();
  ASSERT_TRUE(eventually([&] { return slackNs.load() != 0; }));
  EXPECT_LE(slackNs.load(), 5000);
  timer_.stop(); // the task uses objects that end before the timer
}

TEST_F(TimerTest, TimerThatWasNeverStartedCanBeStopped) {
  task_.dueNow();
  timer_.stop();
  EXPECT_EQ(runs_.load(), 0);
}

TEST_F(TimerTest, StopWaitsForTheTask) {
  std::atomic<bool> isInside{false};
  std::atomic<bool> isAllowed{false};
  std::atomic<bool> hasReturned{false};
  timer_
      .add([&](TimePoint /*now*/) {
        isInside.store(true);
        EXPECT_TRUE(eventually([&] { return isAllowed.load(); }));
        hasReturned.store(true);
        return Timer::kNever;
      })
      .dueNow();
  timer_.start();
  ASSERT_TRUE(eventually([&] { return isInside.load(); }));
  std::thread stopper([&] {
    timer_.stop();
    EXPECT_TRUE(hasReturned.load());
  });
  isAllowed.store(true);
  stopper.join();
}

TEST_F(TimerTest, EarliestDueTimeOfManyThreadsWins) {
  timer_.start();
  std::vector<std::thread> threads;
  for (int id = 0; id < 8; ++id) {
    threads.emplace_back([&, id] {
      for (int step = 0; step < 500; ++step) {
        task_.dueIn(hours(1 + (id + step) % 5));
      }
      if (id == 5) {
        task_.dueNow();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(eventually([&] { return runs_.load() >= 1; }));
}

} // namespace
} // namespace torch_ucx_rpc
