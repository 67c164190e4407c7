#include "agent/timer.h"

#include <pthread.h>

#include <algorithm>

namespace torch_ucx_rpc {

namespace {

// wait_until(time_point::max()) overflows in libstdc++; this is as good as never.
constexpr auto kFarAway = std::chrono::hours(24);

} // namespace

void Timer::start() {
  thread_ = std::thread([this] { loop(); });
}

void Timer::stop() {
  {
    const std::lock_guard lock(mutex_);
    isStopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Timer::dueBy(Clock::time_point when) {
  {
    const std::lock_guard lock(mutex_);
    if (when >= due_) {
      return;
    }
    due_ = when;
  }
  changed_.notify_one(); // without the lock, which who wakes up needs
}

void Timer::loop() {
  pthread_setname_np(pthread_self(), "ucx_rpc_timer");
  std::unique_lock lock(mutex_);
  while (!isStopping_) {
    const Clock::time_point now = Clock::now();
    if (now < due_) {
      changed_.wait_until(lock, std::min(due_, now + kFarAway));
      continue;
    }
    due_ = Clock::time_point::max();
    lock.unlock();
    const Clock::time_point next = onDue_(now);
    lock.lock();
    due_ = std::min(due_, next);
  }
}

} // namespace torch_ucx_rpc
