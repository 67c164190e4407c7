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

namespace torch_ucx_rpc {

// Hooks around the life of a thread that runs user code. module.cpp uses them for a lasting Python thread state.
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
  // Drives progress once, on up to Executor::kMaxLeaders threads at a time. True after events were handed out as
  // tasks, or after Executor::stop() and a wake-up. False if the other leader suffices.
  virtual bool lead() = 0;
};

// The agent's threads: leaders and followers. A leader drives progress, and the events it finds become tasks. It then
// steps down and runs a task itself, so the thread that received a request also runs it. Up to two threads lead. The
// other one stands guard meanwhile, and no thread has to be woken. If there is no other leader, a follower is called.
// Whenever a thread runs a task, another one leads or is on its way. Thread-safe.
//
// There are three kinds of tasks. Requests run user functions, which may block. At most `maxRequests` run at a time,
// and the rest wait in order. Completions (answers) never wait behind requests, because a request may be waiting for
// them. Failures wait behind neither: deadlines hold also where callbacks block every other thread.
//
// Requests that wait for calls of their own do not count towards `maxRequests`: those calls may need a thread here. All
// running requests together are at most `nestingLimit`. If all of them wait, and no task is begun for kFullPatience,
// the request that has queued longest is refused.
//
// A thread calls the hooks when a task says so, not before. A thread that leads must not wait for Python, nor must one
// that runs TorchScript.
//
// Threads are made when they are needed. Up to the number of cores they are made freely, since handlers may run without
// the GIL. Beyond that a thread is made only if tasks wait and none has been begun for kStaleAfter: the existing
// threads then do block.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = UniqueFunction<void()>;

  static constexpr size_t kMaxLeaders = 2;

  // Adds a task to the timer, so it must not have started.
  Executor(size_t maxRequests, size_t nestingLimit, ThreadHooks hooks, Timer& timer);

  // The leader must outlive stop(). Tasks that were added before run now.
  void start(Leader& leader);

  // Adds a task; any thread. `shed` runs, as a completion, in place of a request that no thread can be had for; without
  // one, it waits on.
  void addRequest(Task task, Task shed = {});
  void addCompletion(Task task);
  // The same for a call that fails, at its deadline for one. Runs before other tasks, and on a thread kept for it where
  // callbacks of completions block all others.
  void addFailure(Task task);

  // For a call that the request on this thread makes: until what is returned is released, the request is taken to wait.
  // Null on threads that run no request.
  static std::shared_ptr<void> markBlocked();

  // Whether this thread runs a task, and for such a thread: runs something as soon as that is over.
  static bool isInTask();
  static void runAfterTask(Task then);

  // For tasks that are about to run user code in Python: calls the hooks if this thread, one of an agent's, has not
  // yet.
  static void runHooks();

  // No further task is begun, and `wakeLeader` is called until the leader has noticed. Waits for running tasks up to
  // `limit`; threads that are stuck in user code after that are left behind: they end when that code returns. Returns
  // how many.
  size_t stop(std::chrono::milliseconds limit, const std::function<void()>& wakeLeader);

  // Whether the calling thread is leading, and must therefore neither block nor run user code.
  static bool isLeader();

  struct Counts {
    size_t threads = 0;
    size_t idle = 0; // neither leading nor running a task
    size_t runningRequests = 0; // those included that wait for calls of their own
    size_t nestingRequests = 0; // those
    size_t waitingRequests = 0; // for a thread
  };
  Counts counts() const;

 private:
  static constexpr auto kStaleAfter = std::chrono::milliseconds(1);
  static constexpr auto kFullPatience = std::chrono::milliseconds(1000);

  struct Request {
    Task run;
    Task shed;
  };
  // A request that runs and has made a call, made with its first.
  struct Nesting {
    std::shared_ptr<Executor> threads;
    // Guarded by its mutex_:
    size_t openCalls = 0;
    bool isRunning = true;
  };
  static thread_local Executor* requestRunsOn; // this thread; null while it runs none
  static thread_local std::shared_ptr<Nesting> nesting;

  void add(std::deque<Task>& queue, Task task);
  static void main(const std::shared_ptr<Executor>& self);
  void loop(std::unique_lock<std::mutex>& lock);
  // False where the thread is not needed for leading.
  bool leadOnce(std::unique_lock<std::mutex>& lock);
  void runOne(std::unique_lock<std::mutex>& lock);
  void idle(std::unique_lock<std::mutex>& lock);

  // Calls or makes a thread, if there is something for it to do. True: who is called must be woken, better after
  // unlocking, since it would otherwise wake up only to wait for the lock.
  bool wakeOrSpawnLocked();
  bool wakeIdleLocked();
  void unlockAndWake(std::unique_lock<std::mutex>& lock);
  void addThreadLocked();
  bool spawnLocked(); // false where the system has no more threads
  bool hasTaskLocked() const {
    return !failures_.empty() || (!completions_.empty() && running_ < maxTasksLocked()) ||
        (!requests_.empty() && runningRequests_ - nestingRequests_ < maxRequests_ && runningRequests_ < nestingLimit_);
  }
  // Whether requests queue behind requests that all wait themselves.
  bool isFullLocked() const {
    return !requests_.empty() && runningRequests_ >= nestingLimit_ && nestingRequests_ == runningRequests_;
  }
  // Callbacks of completions may block, for one on calls of their own, whose answers are completions too. So threads
  // for completions are bounded as generously as threads for requests that wait.
  size_t maxTasksLocked() const {
    return maxRequests_ + nestingRequests_ + nestingLimit_;
  }
  bool mayGrowLocked() const {
    return threads_ < maxTasksLocked() + kMaxLeaders + (failures_.empty() ? 0 : 1);
  }
  // Adds a thread if tasks have waited too long, or sheds one; says when it wants to be called again.
  Clock::time_point check(Clock::time_point now);
  // Returns what will not be run.
  Task shedOldestLocked();
  void beginNesting(Nesting& begun);
  void endNesting(Nesting& ended);
  // Whether another thread could still be had without asking whether it is worth it.
  bool hasSpareLocked() const {
    return idle_ != 0 || threads_ < coreThreads_;
  }

  const size_t maxRequests_;
  const size_t coreThreads_;
  const size_t nestingLimit_;
  const ThreadHooks hooks_;
  Leader* leader_ = nullptr; // constant after start()
  Timer::Task& checkTask_;

  mutable std::mutex mutex_;
  std::condition_variable workAvailable_; // idle threads wait here
  std::condition_variable ended_;
  // Guarded by mutex_:
  std::deque<Request> requests_;
  std::deque<Task> completions_;
  std::deque<Task> failures_;
  Clock::time_point lastBegun_{};
  Clock::time_point fullSince_ = Clock::time_point::max(); // max(): it is not
  bool isStopping_ = false;
  bool isStopped_ = false; // completions are run by whoever brings them
  size_t threads_ = 0;
  size_t leaders_ = 0;
  size_t busyLeaders_ = 0; // leaders that run what they brought
  size_t running_ = 0; // threads that run a task
  size_t runningRequests_ = 0;
  size_t nestingRequests_ = 0; // of those
  size_t idle_ = 0; // asleep and not yet called
  size_t pendingWakes_ = 0; // called and not yet awake
};

} // namespace torch_ucx_rpc
