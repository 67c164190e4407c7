#pragma once

#include "base/unique_function.h"
#include "runtime/event_batch.h"
#include "runtime/spinning.h"
#include "runtime/wait_set.h"
#include "runtime/worker_mutex.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Drives a transport. Driving is a role, not a thread: a thread has the role while it is inside lead() or driveUntil().
// The thread that holds the worker lock may use the transport. No code under that lock takes the GIL or runs user code.
// The client collects events under the lock, and they are handed out as an EventBatch after its release. Thread-safe.
//
// Several threads may drive at once: up to two leaders, which are agent threads, and one waiting caller. All of them
// sleep on one WaitSet, which wakes the thread that went to sleep last. So an answer wakes the waiting caller itself,
// and a request wakes the leader whose caches are warm. The others stand guard: they sleep on, and wake for what comes
// while the first thread handles its events. No thread has to be woken to take over. The invariants:
// - While no thread drives, the transport is armed and so will signal, or a thread has been woken to drive, or a leader
//   polls (see below).
// - A woken thread that finds nothing wakes the waiting caller if that sleeps. The wake-up may have been meant for it.
//
// A driver may spin for a while before it sleeps (see Spinning). An arrival then costs no wake-up on either side. But
// an armed transport cannot be disarmed, and it signals whether a thread sleeps or not. The signal costs the sender as
// much as a wake-up. So a driver that spins, and usually comes back soon, leaves the transport unarmed while it is
// away. A leader then polls instead: every kUnarmedPeriod it looks at the watched descriptors, and at how long the
// driver has been away. After a long absence the leader takes over.
class Progress {
 public:
  using Operation = UniqueFunction<void()>;
  using IsDone = UniqueFunction<bool()>;

  Progress(Transport& transport, ProgressClient& client, Waiting waiting = Waiting::kSleep);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Runs an operation under the worker lock: now, on this thread, if the lock is free; otherwise soon, on the thread
  // that holds the lock. Operations that one thread submits run in that order. Events that this thread takes are
  // dispatched on it, without a driver.
  void submit(Operation operation);

  // Runs the client's startDeferredWithWorkerLock(), as submit() runs an operation.
  void requestStartDeferred();
  // startDeferredWithWorkerLock() calls this to run once more, after the next Transport::progress().
  void requestStartDeferredWithWorkerLock() {
    isStartRequested_.store(true);
  }

  // Runs an operation under the worker lock and returns when it has run. Operations that were submitted before may run
  // after it.
  void run(Operation operation);

  // Makes progress until there are events or `isDone` returns true, and spins or sleeps in between. `isDone` is asked
  // without the lock before each sleep, and with it while spinning. Returns at once after close(). Returns null also if
  // this thread is not needed: another leader stands guard, and a waiting caller is to be woken next.
  std::unique_ptr<EventBatch> lead(IsDone isDone) {
    return drive(Role::kLeader, isDone);
  }

  // Drives as the waiting caller, and hands out all events. Ends when `isDone` returns true, when a signal has come in,
  // after half a second without events, at the deadline, or after close(). False, at once, if another thread is the
  // waiting caller.
  bool driveUntil(
      IsDone isDone,
      std::optional<uint64_t> awaitedCall,
      WaitSet::Clock::time_point deadline = WaitSet::Clock::time_point::max());

  // Sets how many processes of the job share this machine. With Waiting::kAuto they spin only if each has a core.
  void setProcessesHere(size_t processes) {
    spinning_.setProcessesHere(processes);
  }

  // Wakes one thread that sleeps in lead() or driveUntil(): the one that went to sleep last.
  void wake() {
    waitSet_.wake();
  }
  // Calls wake() if there is a waiting caller. Its answer may have come by now.
  void wakeWaitingCaller() {
    if (hasWaitingCaller_.load()) {
      wake();
    }
  }

  // Runs an operation once, when a file descriptor becomes readable. The descriptor stays the caller's.
  void watch(int fd, Operation onReadable) {
    waitSet_.watch(fd, std::move(onReadable));
  }

  // Runs a last operation under the worker lock, after all that were submitted before, and never touches the transport
  // again. Operations that are submitted later still run.
  void close(Operation last);

 private:
  std::unique_ptr<EventBatch> drive(Role role, IsDone& isDone);
  // Ends the driving of the waiting caller. Leaves the transport armed or polled, or else wakes another driver.
  void endDriving();
  // Sleeps without the lock, with the transport armed, until there may be something to do. False: this leader is not
  // needed, or the waiting caller was interrupted or has slept as long as it may.
  bool rest(Role role, IsDone& isDone, bool& wasWoken);

  // Advances the transport. A callback that throws, for lack of memory, counts as an advance too.
  unsigned advanceLocked();
  Spinning::Awaited awaitedLocked() const;
  bool hasPending() const {
    return queued_.load() != 0 || isStartRequested_.load();
  }
  void runQueueLocked();
  // Runs the operations that other threads have queued because this thread held the lock.
  void drainQueue();
  static void dispatch(std::unique_ptr<EventBatch> events, const std::optional<Driver>& driver = {}) {
    if (events != nullptr) {
      events->dispatch(driver);
    }
  }
  // Sleeps in the wait set, and queues the operations of descriptors that became readable.
  WaitSet::Slept sleep(WaitSet::Clock::time_point until = WaitSet::Clock::time_point::max());
  // Queues the operations of watched descriptors that have become readable.
  void queueWatches();
  // Locks the worker mutex. A driver that spins under the lock then stops spinning and releases it.
  std::unique_lock<WorkerMutex> lockWorker();
  // Whether the calling driver may leave the transport unarmed. If so, it counts as away.
  bool leaveUnarmedLocked(Role who);
  // Stands in for a driver that left the transport unarmed. Returns when the calling thread must drive.
  void pollUnarmed(IsDone& isDone);

  Transport& transport_;
  ProgressClient& client_;
  WaitSet waitSet_; // own synchronization

  WorkerMutex workerMutex_;
  // Guarded by workerMutex_:
  std::vector<Operation> running_; // the batch of runQueueLocked(); a member so that its memory is reused
  bool isClosed_ = false;
  Spinning spinning_;
  unsigned spins_ = 0; // of all drivers, see kSpinsBetweenLooks

  std::mutex waitingCallerMutex_; // held by the waiting caller
  WaitSet::Clock::time_point callerDeadline_{}; // guarded by waitingCallerMutex_

  std::atomic<int> lockWaiters_{0}; // threads in lockWorker()
  std::mutex queueMutex_;
  std::vector<Operation> queue_; // guarded by queueMutex_

  std::atomic<size_t> queued_{0}; // operations in queue_, readable without its mutex
  std::atomic<bool> isStartRequested_{false};
  std::atomic<int> drivers_{0}; // threads in drive()
  std::atomic<uint64_t> drives_{0}; // how often a thread has begun drive()
  std::atomic<int> sleepers_{0}; // drivers that are about to rest, or in rest()
  std::atomic<int> leadersAsleep_{0}; // sleepers that are leaders on guard; also while they poll
  using Time = Spinning::Clock::rep; // since the clock's epoch
  std::atomic<Time> unarmedSince_{0}; // 0: the transport is armed, or driven
  std::atomic<uint64_t> absences_{0}; // how often a driver has left the transport unarmed
  std::atomic<bool> isPolledUnarmed_{false}; // a leader is in pollUnarmed()
  std::atomic<bool> hasWaitingCaller_{false}; // from its first drive to endDriving(), events included
  std::atomic<bool> isWaitingCallerAsleep_{false};
};

} // namespace torch_ucx_rpc
