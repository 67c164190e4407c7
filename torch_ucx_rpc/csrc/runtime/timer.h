#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {

// One thread that runs named tasks when they are due. A task knows by itself when it wants to run again; nobody else keeps flags or
// due times for it. Tasks run one after another, so a task must not block. Thread-safe, but for add().
class Timer {
 public:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;
  static constexpr TimePoint kNever = TimePoint::max();

  class Task {
   public:
    // Runs the task at `when`, unless it is due earlier. Cheap then.
    void dueBy(TimePoint when);
    void dueIn(Clock::duration delay) {
      dueBy(timer_.now() + delay);
    }
    void dueNow() {
      dueBy(timer_.now());
    }
    const std::string& name() const {
      return name_;
    }

   private:
    friend class Timer;
    // Returns when the task wants to run again; kNever to wait for dueBy().
    using Run = std::function<TimePoint(TimePoint now)>;
    Task(Timer& timer, std::string name, Run run) : timer_(timer), name_(std::move(name)), run_(std::move(run)) {}

    Timer& timer_;
    const std::string name_;
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

  // Before start(). The task lives as long as the timer.
  Task& add(std::string name, Task::Run run);

  void start();
  void stop(); // waits for a task in progress; idempotent

  TimePoint now() const {
    return now_();
  }

  // Runs all tasks that are due at `now`, in the order of add(), and returns when the next one is. The timer's thread calls nothing else.
  TimePoint runDue(TimePoint now);

 private:
  void loop();
  TimePoint nextDueLocked() const;

  const std::function<TimePoint()> now_;
  std::vector<std::unique_ptr<Task>> tasks_; // constant after start(); due_ of each is written under mutex_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  TimePoint wakeAt_ = kNever; // the thread sleeps until then
  bool isStopping_ = false;
  std::thread thread_; // constant between start() and stop()
};

} // namespace torch_ucx_rpc
