#include "runtime/timer.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// wait_until(time_point::max()) overflows in libstdc++, so no wait is longer than this.
constexpr auto kFarAway = std::chrono::hours(24);

// How late Linux may wake the thread. The default, 50 us, would double the shortest periods.
constexpr unsigned long kSlackNs = 1000; // NOLINT(google-runtime-int): as prctl() takes it

} // namespace

void Timer::Task::dueBy(TimePoint when) {
  if (when >= due_.load()) {
    return;
  }
  {
    const std::lock_guard lock(timer_.mutex_);
    if (when >= due_.load()) {
      return;
    }
    due_.store(when);
    if (when >= timer_.wakeAt_) {
      return; // the thread wakes up before that, and looks at all tasks
    }
    timer_.wakeAt_ = when;
  }
  timer_.changed_.notify_one(); // after the lock is released, since the thread that wakes up needs it
}

Timer::Task& Timer::add(Task::Run run) {
  return *tasks_.emplace_back(new Task(*this, std::move(run)));
}

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

Timer::TimePoint Timer::nextDueLocked() const {
  TimePoint next = kNever;
  for (const auto& task : tasks_) {
    next = std::min(next, task->due_.load());
  }
  return next;
}

Timer::TimePoint Timer::runDue(TimePoint now) {
  std::unique_lock lock(mutex_);
  for (const auto& task : tasks_) {
    if (task->due_.load() > now || isStopping_) {
      continue;
    }
    task->due_.store(kNever); // before it runs: a dueBy() from now on asks for another run
    lock.unlock();
    const TimePoint next = task->run_(now);
    lock.lock();
    task->due_.store(std::min(task->due_.load(), next));
  }
  return nextDueLocked();
}

void Timer::loop() {
  pthread_setname_np(pthread_self(), "ucx_rpc_timer");
  (void)prctl(PR_SET_TIMERSLACK, kSlackNs); // where it is refused, tasks run a little later
  std::unique_lock lock(mutex_);
  while (!isStopping_) {
    const TimePoint now = now_();
    wakeAt_ = nextDueLocked();
    if (now < wakeAt_) {
      changed_.wait_until(lock, std::min(wakeAt_, now + kFarAway));
      continue;
    }
    // wakeAt_ has passed, so dueBy() notifies no thread. It need not: the loop looks at all tasks again.
    lock.unlock();
    (void)runDue(now);
    lock.lock();
  }
}

} // namespace torch_ucx_rpc
