#pragma once

#include "agent/mail.h"
#include "base/unique_function.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Drives the transport. Progress is a role, not a thread: whoever calls drive() has it for that long, and whoever holds the
// worker lock may use the transport. Nothing under that lock takes the GIL or runs user code; what happens is collected as
// Deliveries and handed out after unlocking.
//
// Two threads may drive at once: the leader, an agent thread, and one visitor, a caller that waits for its answer. Both sleep
// on one epoll set, edge triggered: the kernel then wakes one of them for an event, the one that went to sleep last
// (ep_poll() queues waiters exclusively, at the head). So the visitor is woken for its answer itself, and the leader, which slept
// before it, sleeps on: two context switches fewer for a call. The invariants that make this safe:
// - The transport is armed, and so will signal, whenever nobody runs in drive(); or somebody has been woken to run there.
// - While the visitor sleeps, the leader does not go to sleep after it, where it would intercept wake-ups meant
//   for the visitor: it parks until the visitor has left.
class Progress {
 public:
  using Operation = UniqueFunction<void()>;

  // `settle` runs under the worker lock after operations and after each progress: it starts what UCX forbids inside its
  // callbacks. `dispatch` gets what was brought about by an operation on the submitting thread, without the lock.
  Progress(Transport& transport, Operation settle, UniqueFunction<void(Deliveries)> dispatch);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Runs an operation under the worker lock: now, on this thread, if the lock is free; otherwise soon, on the thread that
  // holds it. Operations run in the order of their submission by one thread.
  void submit(Operation operation);

  // Runs an operation under the worker lock and returns when it has run.
  void run(Operation operation);

  using IsDone = UniqueFunction<bool()>;

  // Makes progress until something is delivered or `isDone` returns true; sleeps in between. isDone is asked without the
  // lock, before each sleep. After close() it returns at once.
  Deliveries lead(IsDone isDone) {
    return drive(Role::kLeader, isDone);
  }
  // The same for a visitor, one at a time; it returns also when a signal has come in, and every half second. It must call leave()
  // before it goes about other things.
  Deliveries visit(IsDone isDone) {
    return drive(Role::kVisitor, isDone);
  }
  void leave();

  // Wakes one thread that sleeps in lead() or visit(): the latest.
  void wake();

  // Runs an operation, once, when a file descriptor becomes readable. The descriptor stays the caller's.
  void watch(int fd, Operation onReadable);

  // Runs a last operation under the worker lock and never touches the transport again; operations submitted later still run.
  void close(Operation last);

  // Where operations and callbacks put what they brought about. Guarded by the worker lock.
  Deliveries& deliveries() {
    return deliveries_;
  }

 private:
  enum class Role : uint8_t { kLeader, kVisitor };
  Deliveries drive(Role role, IsDone& isDone);

  void runQueueLocked();
  // Runs what others queued while this thread held the lock and they therefore went away.
  void runLeftovers();
  // False where a signal, or its longest time, ended the sleep. Queues the operation of a watched descriptor that became readable.
  bool sleep();
  void parkWhileVisited();

  Transport& transport_;
  Operation settle_;
  UniqueFunction<void(Deliveries)> dispatch_;
  int epollFd_ = -1;
  int wakeFd_ = -1;

  std::mutex workerMutex_; // the worker lock
  // Guarded by workerMutex_:
  Deliveries deliveries_;
  std::vector<Operation> running_; // what runQueueLocked is at; a member so that its memory is reused
  bool isClosed_ = false;

  std::mutex queueMutex_;
  // Guarded by queueMutex_:
  std::vector<Operation> queue_;
  std::vector<Operation> watches_; // what to run; the epoll set knows them by their index
  std::atomic<size_t> queued_{0};
  std::atomic<int> sleepers_{0};

  std::atomic<bool> isVisitorAsleep_{false};
  std::mutex parkMutex_;
  std::condition_variable visitorLeft_;
  std::atomic<bool> isLeaderParked_{false}; // changed under parkMutex_
};

} // namespace torch_ucx_rpc
