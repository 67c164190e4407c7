#pragma once

#include "base/unique_function.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace torch_ucx_rpc {

// What a thread that runs user code needs around its life: a lasting Python thread state, which module.cpp provides. (Without it
// every call of a Python function builds and destroys one: the largest single cost of a small call.)
struct ThreadHooks {
  std::function<void()> onStart;
  std::function<void()> onExit;
};

// The agent's threads: leaders and followers. A leader drives progress; what it brings about becomes tasks; it then steps
// down and runs a task itself, so that a request is run by the very thread that received it. Up to two lead, so that the
// other one stands guard meanwhile and nobody has to be woken; where there is no other, a follower is called. Whenever a
// thread runs a task, another one leads or is on its way.
//
// Two kinds of tasks. Requests run user functions, which may block: at most `maxRequests` at a time, the rest wait in
// order. Completions (answers, failures) are short and never wait behind requests, because a request may be waiting for them.
//
// Threads are made when they are needed: freely up to the number of cores, since handlers may run without the GIL; beyond that
// only when tasks wait and none has been begun for kStaleAfter, which means that the threads there are do block.
class AgentThreads : public std::enable_shared_from_this<AgentThreads> {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = UniqueFunction<void()>;
  using Lead = UniqueFunction<bool()>;
  using CheckAt = UniqueFunction<void(Clock::time_point when)>;

  static constexpr size_t kMostLeaders = 2;

  // `lead` drives progress once, on up to kMostLeaders threads at a time: it returns true after something was delivered (as
  // tasks), or after stop() and a wake-up; false where the other leader suffices. `checkAt` sees to it that check() is
  // called at that time; it must not call back.
  AgentThreads(size_t maxRequests, ThreadHooks hooks, Lead lead, CheckAt checkAt);

  void start();

  // Adds a task; any thread.
  void addRequest(Task task);
  void addCompletion(Task task);

  // Adds a thread if tasks have waited too long; says when it wants to be called again.
  Clock::time_point check(Clock::time_point now);

  // No further task is begun, and `wakeLeader` is called until the leader has noticed. Waits for running tasks up to `limit`; threads
  // that are stuck in user code after that are left behind: they end when that code returns. Returns how many.
  size_t stop(std::chrono::milliseconds limit, const std::function<void()>& wakeLeader);

  // Whether the calling thread is leading, and must therefore neither block nor run user code.
  static bool isLeader();

  struct Counts {
    size_t threads = 0;
    size_t idle = 0; // neither leading nor running a task
    size_t runningRequests = 0;
    size_t waitingRequests = 0;
  };
  Counts counts() const;

 private:
  static constexpr auto kStaleAfter = std::chrono::milliseconds(1);

  static void main(const std::shared_ptr<AgentThreads>& self);
  void loop(std::unique_lock<std::mutex>& lock);
  // False where the thread is not needed for leading.
  bool leadOnce(std::unique_lock<std::mutex>& lock);
  void runOne(std::unique_lock<std::mutex>& lock);
  void idle(std::unique_lock<std::mutex>& lock);

  // Wakes or makes a thread, if there is something for it to do.
  void callHelpLocked();
  bool callIdleLocked();
  void spawnLocked();
  bool hasTaskLocked() const {
    return !completions_.empty() || (!requests_.empty() && runningRequests_ < maxRequests_);
  }
  // Whether another thread could still be had without asking whether it is worth it.
  bool hasSpareLocked() const {
    return idle_ != 0 || threads_ < coreThreads_;
  }

  const size_t maxRequests_;
  const size_t coreThreads_;
  const size_t maxThreads_;
  const ThreadHooks hooks_;
  Lead lead_;
  CheckAt checkAt_;

  mutable std::mutex mutex_;
  std::condition_variable wanted_; // idle threads wait here
  std::condition_variable ended_;
  // Guarded by mutex_:
  std::deque<Task> requests_;
  std::deque<Task> completions_;
  Clock::time_point lastBegun_{};
  bool isCheckDue_ = false;
  bool isStopping_ = false;
  bool isStopped_ = false; // completions are run by whoever brings them
  size_t threads_ = 0;
  size_t leaders_ = 0;
  size_t running_ = 0; // threads that run a task
  size_t runningRequests_ = 0;
  size_t idle_ = 0; // asleep and not yet called
  size_t called_ = 0; // called and not yet awake
};

} // namespace torch_ucx_rpc
