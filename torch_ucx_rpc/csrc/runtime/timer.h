#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {

// One thread that runs tasks when they are due. Each task decides when it runs again, so no other object keeps
// flags or due times for it. Tasks run one after another, and a task must not block. Thread-safe, except add().
class Timer {
 public:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;
  static constexpr TimePoint kNever = TimePoint::max();

  class Task {
   public:
    // Makes the task run at `when`, unless it is due earlier. In that case the call takes no lock.
    void dueBy(TimePoint when);
    void dueIn(Clock::duration delay) {
      dueBy(timer_.now() + delay);
    }
    void dueNow() {
      dueBy(timer_.now());
    }
    // False while it waits for dueBy(), and while it runs.
    bool isScheduled() const {
      return due_.load() != kNever;
    }

   private:
    friend class Timer;
    // Runs the task and returns the time at which it wants to run again. kNever: not before the next dueBy().
    using Run = std::function<TimePoint(TimePoint now)>;
    Task(Timer& timer, Run run) : timer_(timer), run_(std::move(run)) {}

    Timer& timer_;
    const Run run_;
    std::atomic<TimePoint> due_{kNever}; // written with timer_.mutex_ held
  };

  // Tests pass a clock of their own, and call runDue() instead of start().
  explicit Timer(std::function<TimePoint()> now = &Clock::now) : now_(std::move(now)) {}
  ~Timer() {
    stop();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Adds a task; not after start(). The task lives as long as the timer.
  Task& add(Task::Run run);

  void start();
  void stop(); // waits for a task in progress; idempotent

  TimePoint now() const {
    return now_();
  }

  // Runs all tasks that are due at `now`, in the order of add(). Returns the time at which the next task is due. The
  // timer's thread calls nothing else.
  TimePoint runDue(TimePoint now);

 private:
  void loop();
  TimePoint nextDueLocked() const;

  const std::function<TimePoint()> now_;
  std::vector<std::unique_ptr<Task>> tasks_; // constant after start(), except due_ of each task

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  TimePoint wakeAt_ = kNever; // the thread sleeps until then
  bool isStopping_ = false;
  std::thread thread_; // constant between start() and stop()
};

} // namespace torch_ucx_rpc
