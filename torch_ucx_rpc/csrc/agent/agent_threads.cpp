#include "agent/agent_threads.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Set while this thread leads: what it adds it will see to itself when it steps down.
thread_local bool isLeadingThread = false;

} // namespace

AgentThreads::AgentThreads(size_t maxRequests, ThreadHooks hooks, Lead lead, CheckAt checkAt)
    : maxRequests_(maxRequests),
      coreThreads_(std::min<size_t>(maxRequests, std::max(1u, std::thread::hardware_concurrency())) + kMostLeaders),
      // Completions may need threads while every request thread is blocked, and some lead.
      maxThreads_(2 * maxRequests + 1 + kMostLeaders),
      hooks_(std::move(hooks)),
      lead_(std::move(lead)),
      checkAt_(std::move(checkAt)) {}

void AgentThreads::start() {
  const std::lock_guard lock(mutex_);
  spawnLocked();
}

void AgentThreads::spawnLocked() {
  ++threads_;
  try {
    std::thread([self = shared_from_this()] { main(self); }).detach();
  } catch (...) {
    --threads_;
    throw;
  }
}

void AgentThreads::main(const std::shared_ptr<AgentThreads>& self) {
  pthread_setname_np(pthread_self(), "ucx_rpc");
  if (self->hooks_.onStart) {
    self->hooks_.onStart();
  }
  {
    std::unique_lock lock(self->mutex_);
    self->loop(lock);
  }
  if (self->hooks_.onExit) {
    self->hooks_.onExit();
  }
  const std::lock_guard lock(self->mutex_);
  --self->threads_;
  self->ended_.notify_all();
}

void AgentThreads::loop(std::unique_lock<std::mutex>& lock) {
  while (!isStopping_) {
    // While others run tasks somebody must lead, before more tasks are begun, unless a spare thread will.
    const bool mustLead = leaders_ == 0 && running_ != 0 && !hasSpareLocked();
    if (hasTaskLocked() && !mustLead) {
      runOne(lock);
    } else if (leaders_ == kMostLeaders || !leadOnce(lock)) {
      idle(lock);
    }
  }
}

bool AgentThreads::leadOnce(std::unique_lock<std::mutex>& lock) {
  ++leaders_;
  callHelpLocked();
  lock.unlock();
  isLeadingThread = true;
  const bool isNeeded = lead_();
  isLeadingThread = false;
  lock.lock();
  --leaders_;
  return isNeeded || leaders_ == 0 || hasTaskLocked();
}

void AgentThreads::runOne(std::unique_lock<std::mutex>& lock) {
  const bool isRequest = completions_.empty();
  std::deque<Task>& queue = isRequest ? requests_ : completions_;
  Task task = std::move(queue.front());
  queue.pop_front();
  lastBegun_ = Clock::now();
  ++running_;
  runningRequests_ += isRequest ? 1 : 0;
  callHelpLocked();
  lock.unlock();
  task();
  task = {}; // what it owned is destroyed without the lock
  lock.lock();
  --running_;
  runningRequests_ -= isRequest ? 1 : 0;
}

void AgentThreads::idle(std::unique_lock<std::mutex>& lock) {
  ++idle_;
  wanted_.wait(lock, [this] { return called_ != 0 || isStopping_; });
  if (called_ != 0) {
    --called_;
  }
}

bool AgentThreads::callIdleLocked() {
  if (idle_ == 0) {
    return false;
  }
  --idle_;
  ++called_;
  wanted_.notify_one(); // who wakes calls further help, if there is more to do
  return true;
}

void AgentThreads::callHelpLocked() {
  if ((leaders_ != 0 && !hasTaskLocked()) || callIdleLocked()) {
    return;
  }
  if (threads_ < coreThreads_ || (leaders_ == 0 && called_ == 0 && threads_ < maxThreads_)) {
    spawnLocked();
  } else if (hasTaskLocked() && !isCheckDue_) {
    isCheckDue_ = true;
    checkAt_(Clock::now() + kStaleAfter);
  }
}

AgentThreads::Clock::time_point AgentThreads::check(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!isCheckDue_) {
    return Clock::time_point::max();
  }
  if (!hasTaskLocked() || isStopping_) {
    isCheckDue_ = false;
    return Clock::time_point::max();
  }
  if (now - lastBegun_ >= kStaleAfter && !callIdleLocked() && threads_ < maxThreads_) {
    spawnLocked();
  }
  return now + kStaleAfter;
}

void AgentThreads::addRequest(Task task) {
  const std::lock_guard lock(mutex_);
  if (isStopping_) {
    return; // nobody will answer: its caller learns that this worker has gone
  }
  requests_.push_back(std::move(task));
  if (!isLeadingThread) {
    callHelpLocked();
  }
}

void AgentThreads::addCompletion(Task task) {
  std::unique_lock lock(mutex_);
  if (isStopped_) {
    lock.unlock();
    task(); // nobody else is left to complete a future
    return;
  }
  completions_.push_back(std::move(task));
  if (!isLeadingThread) {
    callHelpLocked();
  }
}

size_t AgentThreads::stop(std::chrono::milliseconds limit, const std::function<void()>& wakeLeader) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::deque<Task> dropped;
  std::unique_lock lock(mutex_);
  isStopping_ = true;
  dropped.swap(requests_);
  wanted_.notify_all();
  while (threads_ != 0 && std::chrono::steady_clock::now() < deadline) {
    lock.unlock();
    wakeLeader();
    dropped.clear();
    lock.lock();
    ended_.wait_for(lock, std::chrono::milliseconds(10), [this] { return threads_ == 0; });
  }
  const size_t left = threads_;
  std::deque<Task> completions;
  completions.swap(completions_);
  isStopped_ = true;
  lock.unlock();
  for (Task& task : completions) {
    task(); // futures must be completed, whoever does it
  }
  return left;
}

bool AgentThreads::isLeader() {
  return isLeadingThread;
}

AgentThreads::Counts AgentThreads::counts() const {
  const std::lock_guard lock(mutex_);
  return {threads_, idle_, runningRequests_, requests_.size()};
}

} // namespace torch_ucx_rpc
