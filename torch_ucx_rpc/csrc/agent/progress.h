#pragma once

#include "agent/mail.h"
#include "agent/spinning.h"
#include "base/unique_function.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Drives the transport. Progress is a role, not a thread: whoever calls drive() has it for that long, and whoever holds the
// worker lock may use the transport. Nothing under that lock takes the GIL or runs user code; what happens is collected as
// Deliveries and handed out after unlocking.
//
// Several threads may drive at once: up to two leaders, which are agent threads, and one visitor, a caller that waits for its
// answer. All sleep on one epoll set, edge triggered: the kernel then wakes one of them for an event, the one that went to sleep
// last (ep_poll() queues waiters exclusively, at the head). So a visitor is woken for its answer itself, and of two leaders the
// one whose caches are warm; the others sleep on, and stand guard while that one runs what it was given. Nobody has to be
// woken to take over. The invariants:
// - The transport is armed, and so will signal, whenever nobody runs in drive(); or somebody has been woken to run there; or
//   it is patrolled.
// - Whoever was woken and finds nothing passes it on to the visitor, if that sleeps: it may have been meant for that.
//
// Before it sleeps a driver may spin for a while (see Spinning): what arrives then costs no wake-up on either side. But a
// transport that is armed signals, which costs the sender as much as a wake-up, whether anybody sleeps or not, and cannot be disarmed. So
// who spins, and is mostly back soon, leaves it unarmed. A leader then patrols: it looks every kPatrol whether anybody
// has been away for long, and takes over if so; and at what is watched.
class Progress {
 public:
  using Operation = UniqueFunction<void()>;

  // `settle` runs under the worker lock after operations and after each progress: it starts what UCX forbids inside its
  // callbacks. `dispatch` gets what was brought about by an operation on the submitting thread, without the lock.
  Progress(
      Transport& transport,
      Operation settle,
      UniqueFunction<void(Deliveries)> dispatch,
      Waiting waiting = Waiting::kSleep);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Runs an operation under the worker lock: now, on this thread, if the lock is free; otherwise soon, on the thread that
  // holds it. Operations run in the order of their submission by one thread.
  void submit(Operation operation);

  // Has `settle` run again after the transport has had its turn. Under the worker lock.
  void settleAgain();

  // Runs an operation under the worker lock and returns when it has run.
  void run(Operation operation);

  using IsDone = UniqueFunction<bool()>;

  // Makes progress until something is delivered or `isDone` returns true; spins or sleeps in between. isDone is asked without the
  // lock, before each sleep, and with it while spinning. After close() it returns at once. Returns with nothing also where the
  // calling thread is not needed: another leader stands guard, and a visitor wants to be the next to be woken.
  Deliveries lead(IsDone isDone) {
    return drive(Role::kLeader, isDone);
  }
  // The same for a visitor, one at a time; it returns also when a signal has come in, and every half second. It must call leave()
  // before it goes about other things.
  Deliveries visit(IsDone isDone) {
    return drive(Role::kVisitor, isDone);
  }
  void leave();

  // How many processes of the job share this machine: spinning is for those that have a core each.
  void setProcessesHere(size_t processes) {
    spinning_.setProcessesHere(processes);
  }

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
  Deliveries drive(Role role, IsDone& isDone);
  // Sleeps, armed and without the lock, until there may be something to do. False: the thread is not needed, or was
  // interrupted.
  bool rest(Role role, IsDone& isDone, bool& wasWoken);

  // What has been brought about so far, for who releases the lock next.
  Deliveries takeDeliveriesLocked();
  void runQueueLocked();
  // Runs what others queued while this thread held the lock and they therefore went away.
  void runLeftovers();
  // What ended a sleep: a signal or its longest time; wake(); something that arrived, or a descriptor that became readable, whose
  // operation is then queued.
  enum class Slept : uint8_t { kForNothing, kUntilWoken, kUntilEvent };
  Slept sleep();
  // Queues the operations of watched descriptors that have become readable.
  void queueWatches();
  // Locks the worker mutex; who spins under it makes room.
  std::unique_lock<std::mutex> lockWorker();
  // Whether the calling thread may leave the transport unarmed; if so it counts as away.
  bool leaveToPatrolLocked(Role who);
  // Returns when the calling thread must drive.
  void patrol(IsDone& isDone);

  Transport& transport_;
  Operation settle_;
  UniqueFunction<void(Deliveries)> dispatch_;
  int epollFd_ = -1;
  int wakeFd_ = -1;
  int watchesFd_ = -1; // an epoll set of its own, so that who does not sleep can look at it too

  Turns turns_;
  std::mutex workerMutex_; // the worker lock
  // Guarded by workerMutex_:
  Deliveries deliveries_;
  std::vector<Operation> running_; // what runQueueLocked is at; a member so that its memory is reused
  bool isClosed_ = false;
  Spinning spinning_;
  unsigned spins_ = 0;

  std::atomic<int> lockWaiters_{0};
  std::mutex queueMutex_;
  // Guarded by queueMutex_:
  std::vector<Operation> queue_;
  std::vector<Operation> watches_; // what to run; watchesFd_ knows them by their index
  std::atomic<size_t> queued_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> leadersAsleep_{0};
  using Time = Spinning::Clock::rep; // since the clock's epoch
  std::atomic<Time> awaySince_{0}; // since when the transport has been left to the patrol; 0: it has not
  std::atomic<uint64_t> absences_{0};
  std::atomic<bool> isPatrolled_{false};
  std::atomic<bool> isVisited_{false}; // between visit() and leave()
  std::atomic<bool> isVisitorAsleep_{false};
};

} // namespace torch_ucx_rpc
