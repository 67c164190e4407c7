#pragma once

#include "base/unique_function.h"
#include "runtime/timer.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Hooks around the life of a thread that runs user code. bindings/ uses them for a lasting Python thread state.
// Without one, every call of a Python function builds and destroys a thread state: the largest single cost of a small
// call.
struct ThreadHooks {
  std::function<void()> onStart;
  std::function<void()> onExit;
};

// Drives progress on the executor's threads while they have no task.
class Leader {
 public:
  virtual ~Leader() = default;
  // Drives progress once. Up to Executor::kMaxLeaders threads do so at a time. True after events were handed out as
  // tasks, or after Executor::stop() and a wake-up. False if the other leader suffices.
  virtual bool lead() = 0;
};

// The agent's threads. A thread that has no task may lead: it drives progress, and the events it finds become tasks. It
// then steps down and runs a task itself, so the thread that received a request also runs it. Up to two threads lead:
// if one steps down, the other already waits for events. If there is no other leader, an idle thread is woken.
// Whenever a thread runs a task, another one leads or is on its way. Thread-safe.
//
// There are three kinds of tasks. Requests run user functions, which may block. At most `maxRequests` run at a time,
// and the rest wait in order. Completions (answers) never wait behind requests, because a request may be waiting for
// them. Failures wait behind neither: deadlines hold also where callbacks block every other thread.
//
// Requests that wait for calls of their own do not count towards `maxRequests`: those calls may need a thread here. All
// running requests together are at most `nestingLimit`. If all of them wait, and no task is begun for kFullPatience,
// the request that has queued longest is shed.
//
// A thread calls the hooks only when a task asks for them: threads that lead or run TorchScript must not wait for
// Python.
//
// Threads are made when they are needed. Up to about the number of cores they are made freely, since handlers may run
// without the GIL. Beyond that a thread is made only if tasks wait, none has been begun for kStaleAfter, and no thread
// is about to run. That means that the existing threads block. The thread that was busy last is woken first. Beyond the
// number of cores, threads that stay idle for `spareAfter` end: each costs memory, some of it in libraries that it has
// called.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = UniqueFunction<void()>;

  static constexpr size_t kMaxLeaders = 2;

  static constexpr auto kSpareAfter = std::chrono::seconds(10);

  // Adds a task to the timer, so the timer must not have started.
  Executor(
      size_t maxRequests,
      size_t nestingLimit,
      ThreadHooks hooks,
      Timer& timer,
      Clock::duration spareAfter = kSpareAfter);

  // Starts the first thread. Tasks that were added before run now. The leader must outlive stop().
  void start(Leader& leader);

  // Adds a task, on any thread. If there is no thread for a request, `shed` runs in its place, as a completion. A
  // request without `shed` keeps waiting.
  void addRequest(Task task, Task shed = {});
  void addCompletion(Task task);
  // Adds the completion of a call that fails, at its deadline for instance. It runs before other tasks. If callbacks of
  // completions block all other threads, it runs on one more thread, which is made for failures.
  void addFailure(Task task);

  // Marks the request that runs on this thread as waiting for a call of its own, until the returned guard is released.
  // Null on threads that run no request.
  static std::shared_ptr<void> markBlocked();

  // Runs `work`, a part of this thread's request, on a new thread, and waits for it. Calls that `work` makes are the
  // request's.
  void runOnOwnThread(const std::function<void()>& work) const;

  // Whether this thread runs a task. If it does, runAfterTask() runs something right after the task.
  static bool isInTask();
  static void runAfterTask(Task then);

  // Calls the hooks, if this is a thread of an agent that has not called them yet. For tasks that are about to run
  // Python.
  static void runHooks();

  // Begins no further task, and calls `wakeLeader` until the leaders have noticed. Waits for running tasks up to
  // `limit`. Threads that are stuck in user code after that are left behind, and end when that code returns. Returns
  // the number of threads left behind. Threads without a task only need a core to end, and have kCorePatience more for
  // that on a busy machine.
  size_t stop(std::chrono::milliseconds limit, const std::function<void()>& wakeLeader);

  // Whether the calling thread is leading, and must therefore neither block nor run user code.
  static bool isLeader();

  struct Counts {
    size_t threads = 0;
    size_t idle = 0; // neither leading nor running a task
    size_t runningRequests = 0; // including those that wait for calls of their own
    size_t nestingRequests = 0; // running requests that wait for calls of their own
    size_t waitingRequests = 0; // requests that wait for a thread
  };
  Counts counts() const;

 private:
  static constexpr auto kStaleAfter = std::chrono::milliseconds(1);
  static constexpr auto kFullPatience = std::chrono::milliseconds(1000);
  static constexpr auto kCorePatience = std::chrono::seconds(10);

  struct Request {
    Task run;
    Task shed;
  };
  // The open calls of a running request. Made with its first call.
  struct Nesting {
    std::shared_ptr<Executor> threads;
    // Guarded by its mutex_:
    size_t openCalls = 0;
    bool isRunning = true;
  };
  static thread_local Executor* requestRunsOn; // the executor whose request this thread runs, or null
  static thread_local std::shared_ptr<Nesting> nesting;

  void add(std::deque<Task>& queue, Task task);
  static void main(const std::shared_ptr<Executor>& self);
  // The place where a thread sleeps. Beds are kept for later threads: a thread that has gone on, or has even ended, may
  // still be notified.
  struct Bed {
    std::condition_variable changed;
    bool isWoken = false;
  };
  Bed& takeBedLocked();

  void loop(std::unique_lock<std::mutex>& lock, Bed& bed);
  // False where the thread is not needed for leading.
  bool leadOnce(std::unique_lock<std::mutex>& lock);
  void runOne(std::unique_lock<std::mutex>& lock);
  // Sleeps until there is work. False: the thread is spare.
  bool idle(std::unique_lock<std::mutex>& lock, Bed& bed);

  // Wakes or makes a thread if there is something for it to do. The caller notifies the bed, unless it is null, after
  // unlocking: otherwise the woken thread would only wait for the lock.
  Bed* wakeOrSpawnLocked();
  Bed* wakeIdleLocked(); // null if no thread is idle
  void unlockAndWake(std::unique_lock<std::mutex>& lock);
  void addThreadLocked();
  bool spawnLocked(); // false where the system has no more threads
  bool hasTaskLocked() const {
    return !failures_.empty() || (!completions_.empty() && running_ < maxTasksLocked()) ||
        (!requests_.empty() && runningRequests_ - nestingRequests_ < maxRequests_ && runningRequests_ < nestingLimit_);
  }
  // Whether requests queue while as many run as may, and all of those wait for calls of their own.
  bool isFullLocked() const {
    return !requests_.empty() && runningRequests_ >= nestingLimit_ && nestingRequests_ == runningRequests_;
  }
  // Callbacks of completions may block, for instance on calls of their own, whose answers are completions too. So the
  // bound on threads for completions is as generous as that for requests that wait.
  size_t maxTasksLocked() const {
    return maxRequests_ + nestingRequests_ + nestingLimit_;
  }
  // Whether a thread was made or woken that has not run since. On busy cores that takes a while.
  bool isThreadComingLocked() const {
    return beginning_ + pendingWakes_ != 0;
  }
  bool mayGrowLocked() const {
    return threads_ < maxTasksLocked() + kMaxLeaders + (failures_.empty() ? 0 : 1);
  }
  // Timer task: adds a thread if tasks have waited too long, or sheds a request.
  Clock::time_point check(Clock::time_point now);
  // Sheds the oldest request that may be shed. Returns its task, to be destroyed without the lock.
  Task shedOldestLocked();
  void beginNesting(Nesting& begun);
  void endNesting(Nesting& ended);
  // Whether a thread is idle, or another thread may be made.
  bool hasSpareLocked() const {
    return !idle_.empty() || threads_ < coreThreads_;
  }

  const size_t maxRequests_;
  const size_t coreThreads_;
  const size_t nestingLimit_;
  const ThreadHooks hooks_;
  const Clock::duration spareAfter_;
  Leader* leader_ = nullptr; // constant after start()
  Timer::Task& checkTask_;

  mutable std::mutex mutex_;
  std::condition_variable ended_;
  // Guarded by mutex_:
  std::deque<Request> requests_;
  std::deque<Task> completions_;
  std::deque<Task> failures_;
  Clock::time_point lastBegun_{};
  Clock::time_point fullSince_ = Clock::time_point::max(); // max() if not full
  bool isStopping_ = false;
  bool isStopped_ = false; // completions and failures run on the thread that adds them
  size_t threads_ = 0;
  size_t beginning_ = 0; // made, and not yet running
  size_t leaders_ = 0;
  size_t busyLeaders_ = 0; // threads that have led, now run tasks, and will lead again
  size_t running_ = 0; // threads that run a task
  size_t exiting_ = 0; // threads in the hook for their end, which may wait for Python as tasks do
  size_t runningRequests_ = 0;
  size_t nestingRequests_ = 0; // of those, requests that wait for calls of their own
  std::deque<Bed> beds_; // as many as threads ever ran at a time
  std::vector<Bed*> freeBeds_;
  std::vector<Bed*> idle_; // of threads that are asleep, and not yet woken
  size_t pendingWakes_ = 0; // woken, and not yet awake
};

} // namespace torch_ucx_rpc
