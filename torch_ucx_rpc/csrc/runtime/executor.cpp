#include "runtime/executor.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

// Whether this thread leads. A task that it adds then wakes no other thread: it runs the task itself when it steps
// down.
thread_local bool isLeadingThread = false;
// Tasks to run after the task of this thread; null while the thread runs none.
thread_local std::vector<Executor::Task>* afterTask = nullptr;
// The hooks that this thread has yet to call. Null after that, and on threads that are not an agent's.
thread_local const ThreadHooks* hooksToRun = nullptr;

} // namespace

thread_local Executor* Executor::requestRunsOn = nullptr;
thread_local std::shared_ptr<Executor::Nesting> Executor::nesting;

// Where the threads are. Whenever the lock is free, each of them is counted in one place:
//
//   threads_ = leaders_ + running_ + idle_.size() + pendingWakes_ + beginning_ + threads that end
//
// A thread begins between spawnLocked() and its first lock, and ends after loop(). Parts of running_ are counted again:
//
//   nestingRequests_ <= runningRequests_ <= running_      busyLeaders_ <= running_
//
// The limits are leaders_ <= kMaxLeaders and runningRequests_ <= nestingLimit_. maxRequests_ limits only which requests
// begin: when calls of nesting requests end, more than that many compute for a while.
Executor::Executor(size_t maxRequests, size_t nestingLimit, ThreadHooks hooks, Timer& timer, Clock::duration spareAfter)
    : maxRequests_(maxRequests),
      coreThreads_(std::min<size_t>(maxRequests, std::max(1u, std::thread::hardware_concurrency())) + kMaxLeaders),
      nestingLimit_(std::max(maxRequests, nestingLimit)),
      hooks_(std::move(hooks)),
      spareAfter_(spareAfter),
      checkTask_(timer.add([this](Clock::time_point now) { return check(now); })) {}

void Executor::start(Leader& leader) {
  const std::lock_guard lock(mutex_);
  leader_ = &leader;
  if (!spawnLocked()) {
    throw std::runtime_error("the system has no thread left for RPC; raise the limit of processes (ulimit -u)");
  }
}

bool Executor::spawnLocked() {
  // Detached: stop() leaves a thread behind that is stuck in user code, and that thread keeps this object alive.
  try {
    std::thread([self = shared_from_this()] { main(self); }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  ++threads_;
  ++beginning_;
  return true;
}

void Executor::main(const std::shared_ptr<Executor>& self) {
  pthread_setname_np(pthread_self(), "ucx_rpc");
  hooksToRun = &self->hooks_;
  std::unique_lock lock(self->mutex_);
  --self->beginning_;
  Bed& bed = self->takeBedLocked();
  self->loop(lock, bed);
  self->freeBeds_.push_back(&bed);
  if (hooksToRun == nullptr && self->hooks_.onExit) {
    ++self->exiting_;
    lock.unlock();
    self->hooks_.onExit();
    lock.lock();
    --self->exiting_;
  }
  // Last of all, since stop() takes it for the end of the thread.
  --self->threads_;
  self->ended_.notify_all();
}

Executor::Bed& Executor::takeBedLocked() {
  if (freeBeds_.empty()) {
    return beds_.emplace_back();
  }
  Bed& bed = *freeBeds_.back();
  freeBeds_.pop_back();
  return bed;
}

void Executor::loop(std::unique_lock<std::mutex>& lock, Bed& bed) {
  bool isBusyLeader = false; // this thread has led, and now runs tasks
  while (!isStopping_) {
    // While other threads run tasks, one thread must lead. This thread does so before it begins another task, unless a
    // spare thread will.
    const bool mustLead = leaders_ == 0 && running_ != 0 && !hasSpareLocked();
    if (hasTaskLocked() && !mustLead) {
      runOne(lock);
      continue;
    }
    busyLeaders_ -= std::exchange(isBusyLeader, false) ? 1 : 0;
    // A busy leader leads again after its tasks, and Progress counts on that. So it keeps its place.
    const bool isWanted = leaders_ == 0 || leaders_ + busyLeaders_ < kMaxLeaders;
    if (isWanted && leadOnce(lock)) {
      isBusyLeader = true;
      ++busyLeaders_;
    } else if (!idle(lock, bed)) {
      return;
    }
  }
  busyLeaders_ -= isBusyLeader ? 1 : 0;
}

bool Executor::leadOnce(std::unique_lock<std::mutex>& lock) {
  ++leaders_;
  unlockAndWake(lock);
  isLeadingThread = true;
  const bool isNeeded = leader_->lead();
  isLeadingThread = false;
  lock.lock();
  --leaders_;
  // lead() has judged without the lock: the other leader may be gone by now.
  return isNeeded || leaders_ == 0 || hasTaskLocked();
}

void Executor::runOne(std::unique_lock<std::mutex>& lock) {
  bool isRequest = false;
  Task task;
  if (!failures_.empty()) {
    task = std::move(failures_.front());
    failures_.pop_front();
  } else if (!completions_.empty() && running_ < maxTasksLocked()) {
    task = std::move(completions_.front());
    completions_.pop_front();
  } else { // the caller has seen hasTaskLocked(), so a request may begin
    isRequest = true;
    task = std::move(requests_.front().run);
    requests_.pop_front();
  }
  lastBegun_ = Clock::now();
  ++running_;
  runningRequests_ += isRequest ? 1 : 0;
  unlockAndWake(lock);
  requestRunsOn = isRequest ? this : nullptr;
  std::vector<Task> after;
  afterTask = &after;
  task();
  task = {}; // the task's captures are destroyed without the lock
  afterTask = nullptr; // first: the task is over, and has released torch's locks
  for (Task& then : after) {
    then();
  }
  after.clear();
  requestRunsOn = nullptr;
  const std::shared_ptr<Nesting> nested = std::exchange(nesting, nullptr);
  lock.lock();
  if (nested != nullptr) {
    // Calls of the request may still be open, those of rpc_async for instance. Their end must not count the request
    // down again.
    nested->isRunning = false;
    nestingRequests_ -= nested->openCalls != 0 ? 1 : 0;
  }
  --running_;
  runningRequests_ -= isRequest ? 1 : 0;
}

bool Executor::isInTask() {
  return afterTask != nullptr;
}

void Executor::runAfterTask(Task then) {
  afterTask->push_back(std::move(then));
}

void Executor::runHooks() {
  const ThreadHooks* hooks = std::exchange(hooksToRun, nullptr);
  if (hooks != nullptr && hooks->onStart) {
    hooks->onStart();
  }
}

std::shared_ptr<void> Executor::markBlocked() {
  if (requestRunsOn == nullptr) {
    return nullptr;
  }
  if (nesting == nullptr) {
    nesting = std::make_shared<Nesting>();
    nesting->threads = requestRunsOn->shared_from_this();
  }
  nesting->threads->beginNesting(*nesting);
  return {nesting.get(), [nested = nesting](Nesting* /*same*/) { nested->threads->endNesting(*nested); }};
}

void Executor::runOnOwnThread(const std::function<void()>& work) const {
  std::exception_ptr failure;
  std::thread([&, requestRunsOnCaller = requestRunsOn, &nestingOfCaller = nesting] {
    requestRunsOn = requestRunsOnCaller;
    nesting = std::move(nestingOfCaller);
    if (hooks_.onStart) { // not runHooks(), which knows the threads of main() alone
      hooks_.onStart();
    }
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    if (hooks_.onExit) {
      hooks_.onExit();
    }
    nestingOfCaller = std::move(nesting);
  }).join();
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void Executor::beginNesting(Nesting& begun) {
  std::unique_lock lock(mutex_);
  if (begun.openCalls++ == 0) {
    ++nestingRequests_;
    unlockAndWake(lock); // requests may have waited for this
  }
}

void Executor::endNesting(Nesting& ended) {
  const std::lock_guard lock(mutex_);
  if (--ended.openCalls == 0 && ended.isRunning) {
    --nestingRequests_;
  }
}

bool Executor::idle(std::unique_lock<std::mutex>& lock, Bed& bed) {
  const auto isOver = [&] { return bed.isWoken || isStopping_; };
  bed.isWoken = false;
  idle_.push_back(&bed);
  bool isSpare = false;
  while (!isOver() && !isSpare) {
    if (threads_ <= coreThreads_) {
      bed.changed.wait(lock, isOver);
    } else if (!bed.changed.wait_for(lock, spareAfter_, isOver)) {
      isSpare = threads_ > coreThreads_;
    }
  }
  if (bed.isWoken) {
    --pendingWakes_;
  } else {
    std::erase(idle_, &bed);
  }
  return !isSpare;
}

Executor::Bed* Executor::wakeIdleLocked() {
  if (idle_.empty()) {
    return nullptr;
  }
  // The thread counts as no longer idle before it is awake, so that the next task wakes another one.
  Bed* const last = idle_.back();
  idle_.pop_back();
  last->isWoken = true;
  ++pendingWakes_; // the woken thread wakes another one if there is more to do
  return last;
}

void Executor::unlockAndWake(std::unique_lock<std::mutex>& lock) {
  Bed* const woken = wakeOrSpawnLocked();
  lock.unlock();
  if (woken != nullptr) {
    woken->changed.notify_one();
  }
}

Executor::Bed* Executor::wakeOrSpawnLocked() {
  if (leader_ == nullptr) {
    return nullptr; // start() makes the first thread
  }
  const bool hasTask = hasTaskLocked();
  if (leaders_ == 0 || hasTask) {
    if (Bed* const woken = wakeIdleLocked()) {
      return woken;
    }
    // Without a leader nothing more arrives. So a thread is made to lead even beyond the number of cores, unless
    // another one is about to lead.
    if ((threads_ < coreThreads_ || (leaders_ == 0 && !isThreadComingLocked() && mayGrowLocked())) && spawnLocked()) {
      return nullptr;
    }
  }
  if (hasTask || isFullLocked()) { // the timer has no lock while it runs check(), so its lock may be taken here
    checkTask_.dueBy(Clock::now() + (hasTask ? kStaleAfter : kFullPatience));
  }
  return nullptr;
}

void Executor::addThreadLocked() {
  if (Bed* const woken = wakeIdleLocked()) {
    woken->changed.notify_one();
  } else if (mayGrowLocked()) {
    spawnLocked();
  }
}

Timer::TimePoint Executor::check(Clock::time_point now) {
  // Destroyed without the lock: the share of the receive window that it frees lets in messages that become tasks.
  Task shed;
  const std::lock_guard lock(mutex_);
  if (isStopping_) {
    return Timer::kNever;
  }
  if (hasTaskLocked()) {
    fullSince_ = Clock::time_point::max();
    if (now - lastBegun_ >= kStaleAfter && !isThreadComingLocked()) {
      addThreadLocked();
    }
    return now + kStaleAfter;
  }
  if (!isFullLocked()) {
    fullSince_ = Clock::time_point::max();
    return Timer::kNever;
  }
  // Each task that has begun is progress, after which the wait starts again.
  fullSince_ = std::max(lastBegun_, std::min(fullSince_, now));
  if (now - fullSince_ >= kFullPatience) {
    shed = shedOldestLocked();
    fullSince_ = now;
  }
  return fullSince_ + kFullPatience;
}

Executor::Task Executor::shedOldestLocked() {
  Task shed;
  const auto oldest =
      std::find_if(requests_.begin(), requests_.end(), [](const Request& request) { return bool(request.shed); });
  if (oldest != requests_.end()) {
    shed = std::move(oldest->run);
    completions_.push_back(std::move(oldest->shed));
    requests_.erase(oldest);
    addThreadLocked();
  }
  return shed;
}

void Executor::addRequest(Task task, Task shed) {
  std::unique_lock lock(mutex_);
  if (isStopping_) {
    return; // no answer is needed: the caller learns that this worker has gone
  }
  requests_.push_back({std::move(task), std::move(shed)});
  if (!isLeadingThread) {
    unlockAndWake(lock);
  }
}

void Executor::addCompletion(Task task) {
  add(completions_, std::move(task));
}

void Executor::addFailure(Task task) {
  add(failures_, std::move(task));
}

void Executor::add(std::deque<Task>& queue, Task task) {
  std::unique_lock lock(mutex_);
  if (isStopped_) {
    lock.unlock();
    task(); // no other thread is left to complete a future
    return;
  }
  queue.push_back(std::move(task));
  if (!isLeadingThread) {
    unlockAndWake(lock);
  }
}

// Threads that are in user code cannot be interrupted. They are counted, and end when the user code returns. Tasks that
// they add before isStopped_ is set are queued, and run below with the rest.
size_t Executor::stop(std::chrono::milliseconds limit, const std::function<void()>& wakeLeader) {
  const Clock::time_point deadline = Clock::now() + limit;
  std::deque<Request> dropped;
  std::unique_lock lock(mutex_);
  const auto isOver = [&] {
    const Clock::duration patience = threads_ == running_ + exiting_ ? Clock::duration::zero() : kCorePatience;
    return threads_ == 0 || Clock::now() >= deadline + patience;
  };
  isStopping_ = true;
  dropped.swap(requests_);
  for (Bed* bed : idle_) {
    bed->changed.notify_one();
  }
  while (!isOver()) {
    lock.unlock();
    wakeLeader(); // again and again: each call wakes one sleeper, which may be a waiting caller
    dropped.clear(); // without the lock, like what check() sheds
    lock.lock();
    ended_.wait_for(lock, std::chrono::milliseconds(1), [this] { return threads_ == 0; });
  }
  const size_t left = threads_;
  std::deque<Task> completions;
  completions.swap(completions_);
  std::deque<Task> failures;
  failures.swap(failures_);
  isStopped_ = true;
  lock.unlock();
  for (std::deque<Task>* queue : {&failures, &completions}) {
    for (Task& task : *queue) {
      task(); // futures must be completed, whichever thread does it
    }
  }
  return left;
}

bool Executor::isLeader() {
  return isLeadingThread;
}

Executor::Counts Executor::counts() const {
  const std::lock_guard lock(mutex_);
  return {threads_, idle_.size(), runningRequests_, nestingRequests_, requests_.size()};
}

} // namespace torch_ucx_rpc
