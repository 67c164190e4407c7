#pragma once

#include "base/unique_function.h"
#include "runtime/event_batch.h"
#include "runtime/spinning.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Drives a transport. Progress is a role, not a thread: the thread inside lead() or driveUntil() has it for that long, and the thread
// that holds the worker lock may use the transport. Nothing under that lock takes the GIL or runs user code; events are collected by
// the client and handed out as an EventBatch after the lock is released.
//
// Several threads may drive at once: up to two leaders, which are agent threads, and one waiting caller. All sleep on one epoll set,
// edge triggered: the kernel then wakes one of them for an event, the one that went to sleep last (ep_poll() queues waiters
// exclusively, at the head). So a waiting caller is woken for its answer itself, and of two leaders the one whose caches are warm; the
// others sleep on, and stand guard while that one runs what it was given. Nobody has to be woken to take over. The invariants:
// - The transport is armed, and so will signal, whenever nobody drives; or somebody has been woken to drive; or a leader polls it
//   unarmed.
// - A thread that was woken and finds nothing passes the wake-up on to the waiting caller, if that sleeps: it may have been meant for it.
//
// Before it sleeps a driver may spin for a while (see Spinning): an arrival then costs no wake-up on either side. But an armed transport
// signals whether anybody sleeps or not, which costs the sender as much as a wake-up, and it cannot be disarmed. So a driver that spins,
// and is mostly back soon, leaves it unarmed. A leader then polls instead: every kUnarmedPeriod it looks whether the driver has been away for
// long, and takes over if so; and at the watched descriptors.
class Progress {
 public:
  using Operation = UniqueFunction<void()>;
  using IsDone = UniqueFunction<bool()>;

  Progress(Transport& transport, ProgressClient& client, Waiting waiting = Waiting::kSleep);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Runs an operation under the worker lock: now, on this thread, if the lock is free; otherwise soon, on the thread that
  // holds it. Operations run in the order of their submission by one thread. Events are dispatched on this thread, without a driver.
  void submit(Operation operation);

  // Has the client's startDeferredWithWorkerLock() run, as submit() would have an operation run.
  void requestStartDeferred();
  // The same from within that function: once more, after the transport has had its turn.
  void requestStartDeferredWithWorkerLock() {
    isStartRequested_.store(true);
  }

  // Runs an operation under the worker lock and returns when it has run.
  void run(Operation operation);

  // Makes progress until there are events or `isDone` returns true; spins or sleeps in between. isDone is asked without the
  // lock, before each sleep, and with it while spinning. After close() it returns at once. Returns null also where the
  // calling thread is not needed: another leader stands guard, and a waiting caller wants to be the next to be woken.
  std::unique_ptr<EventBatch> lead(IsDone isDone) {
    return drive(Role::kLeader, isDone);
  }

  // Drives as a waiting caller until `isDone` returns true, a signal has come in, or half a second has passed without events, and hands
  // out all events. False, at once, if another thread is the waiting caller.
  bool driveUntil(IsDone isDone, std::optional<uint64_t> awaitedCall);

  // How many processes of the job share this machine: spinning is for those that have a core each.
  void setProcessesHere(size_t processes) {
    spinning_.setProcessesHere(processes);
  }

  // Wakes one thread that sleeps in lead() or driveUntil(): the latest.
  void wake();
  // The same if there is a waiting caller, which may now be done.
  void wakeWaitingCaller() {
    if (hasWaitingCaller_.load()) {
      wake();
    }
  }

  // Runs an operation, once, when a file descriptor becomes readable. The descriptor stays the caller's.
  void watch(int fd, Operation onReadable);

  // Runs a last operation under the worker lock and never touches the transport again; operations submitted later still run.
  void close(Operation last);

 private:
  std::unique_ptr<EventBatch> drive(Role role, IsDone& isDone);
  // The waiting caller goes about other things.
  void endDriving();
  // Sleeps, armed and without the lock, until there may be something to do. False: the thread is not needed, or was
  // interrupted.
  bool rest(Role role, IsDone& isDone, bool& wasWoken);

  bool hasPending() const {
    return queued_.load() != 0 || isStartRequested_.load();
  }
  void runQueueLocked();
  // Runs operations that other threads queued while this thread held the lock and they therefore went away.
  void drainQueue();
  static void dispatch(std::unique_ptr<EventBatch> events, const std::optional<Driver>& driver = {}) {
    if (events != nullptr) {
      events->dispatch(driver);
    }
  }
  // What ended a sleep: a signal or its longest time; wake(); something that arrived, or a descriptor that became readable, whose
  // operation is then queued.
  enum class Slept : uint8_t { kForNothing, kUntilWoken, kUntilEvent };
  Slept sleep();
  // Queues the operations of watched descriptors that have become readable.
  void queueWatches();
  // Locks the worker mutex; a thread that spins under it makes room.
  std::unique_lock<std::mutex> lockWorker();
  // Whether the calling thread may leave the transport unarmed; if so it counts as away.
  bool leaveUnarmedLocked(Role who);
  // Stands in for a driver that left the transport unarmed. Returns when the calling thread must drive.
  void pollUnarmed(IsDone& isDone);

  Transport& transport_;
  ProgressClient& client_;
  int epollFd_ = -1;
  int wakeFd_ = -1;
  int watchesFd_ = -1; // an epoll set of its own, so that a thread that does not sleep can look at it too

  std::mutex workerMutex_; // the worker lock
  // Guarded by workerMutex_:
  std::vector<Operation> running_; // the batch of runQueueLocked(); a member so that its memory is reused
  bool isClosed_ = false;
  Spinning spinning_;
  unsigned spins_ = 0;

  std::mutex waitingCallerMutex_; // held by the waiting caller

  std::atomic<int> lockWaiters_{0};
  std::mutex queueMutex_;
  // Guarded by queueMutex_:
  std::vector<Operation> queue_;
  std::vector<Operation> watches_; // what to run; watchesFd_ knows them by their index

  std::atomic<size_t> queued_{0};
  std::atomic<bool> isStartRequested_{false};
  std::atomic<int> sleepers_{0};
  std::atomic<int> leadersAsleep_{0};
  using Time = Spinning::Clock::rep; // since the clock's epoch
  std::atomic<Time> unarmedSince_{0}; // 0: it is armed, or driven
  std::atomic<uint64_t> absences_{0};
  std::atomic<bool> isPolledUnarmed_{false};
  std::atomic<bool> hasWaitingCaller_{false};
  std::atomic<bool> isWaitingCallerAsleep_{false};
};

} // namespace torch_ucx_rpc
