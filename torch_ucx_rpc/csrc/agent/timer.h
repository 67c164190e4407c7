#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace torch_ucx_rpc {

// One thread that calls a function when it is due, and asks it each time when it is due next.
class Timer {
 public:
  using Clock = std::chrono::steady_clock;
  using OnDue = std::function<Clock::time_point(Clock::time_point now)>;

  explicit Timer(OnDue onDue) : onDue_(std::move(onDue)) {}
  ~Timer() {
    stop();
  }

  void start();
  void stop(); // waits for a call in progress; idempotent

  // Makes the function due by `when`, if it is not due earlier. Thread-safe.
  void dueBy(Clock::time_point when);

 private:
  void loop();

  const OnDue onDue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Clock::time_point due_ = Clock::time_point::max();
  bool isStopping_ = false;
  std::thread thread_; // constant between start() and stop()
};

} // namespace torch_ucx_rpc
