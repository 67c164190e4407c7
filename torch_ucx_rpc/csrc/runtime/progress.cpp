#include "runtime/progress.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// An arrival may wait for this long while the transport is unarmed and a leader polls. Polling ends after kQuietRounds
// rounds without a new absence.
constexpr auto kUnarmedPeriod = std::chrono::milliseconds(1);
constexpr int kQuietRounds = 20;

// How many times a driver that is about to leave looks for more events. It leaves the rest to another driver.
constexpr int kMaxRounds = 8;

using Clock = Spinning::Clock;
// When this thread last left drive() to handle events.
thread_local Clock::time_point leftAt{};

// A driver that spins checks the watched descriptors once in this many spins, in case no thread sleeps on them.
constexpr unsigned kSpinsBetweenLooks = 1024;

// A transport that waits for room on the other side cannot be armed. For this long its driver only yields. Then it
// naps: a process that makes no room for so long is busy with something else, or stopped.
constexpr auto kPatienceForRoom = std::chrono::milliseconds(2);
constexpr auto kNap = std::chrono::microseconds(500);

void yieldFor(Clock::duration sinceMoved) {
  if (sinceMoved < kPatienceForRoom) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
}

} // namespace

Progress::Progress(Transport& transport, ProgressClient& client, Waiting waiting)
    : transport_(transport), client_(client), waitSet_(transport.eventFd()), spinning_(waiting) {}

void Progress::requestStartDeferred() {
  isStartRequested_.store(true);
  drainQueue();
}

void Progress::submit(Operation operation) {
  // The operation goes through the queue even if the lock is free: an earlier one of this thread may still wait there.
  {
    const std::lock_guard lock(queueMutex_);
    queue_.push_back(std::move(operation));
    queued_.fetch_add(1);
  }
  drainQueue();
}

void Progress::run(Operation operation) {
  std::unique_ptr<EventBatch> events;
  {
    const std::unique_lock lock = lockWorker();
    operation();
    events = client_.takeEventsWithWorkerLock();
  }
  dispatch(std::move(events));
  drainQueue();
}

unsigned Progress::advanceLocked() {
  try {
    return transport_.progress();
  } catch (const std::exception&) {
    return 1; // the transport stays usable, and its next progress() reports the rest
  }
}

Spinning::Awaited Progress::awaitedLocked() const {
  const bool isTransferring = transport_.operationsInFlight() != 0;
  if (client_.waitsForDeviceWithWorkerLock() || (isTransferring && client_.usesDevices())) {
    return Spinning::Awaited::kDevice;
  }
  return isTransferring ? Spinning::Awaited::kTransfer : Spinning::Awaited::kMessage;
}

void Progress::runQueueLocked() {
  while (queued_.load() != 0) {
    {
      const std::lock_guard lock(queueMutex_);
      running_.swap(queue_);
      queued_.store(0);
    }
    for (Operation& operation : running_) {
      operation();
    }
    running_.clear();
  }
  isStartRequested_.store(false); // before it starts anything: a request from now on asks for another round
  if (!isClosed_) {
    client_.startDeferredWithWorkerLock();
  }
}

void Progress::drainQueue() {
  // A thread that queues and finds the lock taken leaves its operation to the holder; the holder looks here after
  // unlocking. The fence makes sure that one of the two threads sees what the other has done. The one queues before its
  // try_lock, and the other unlocks before its load here.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (hasPending()) {
    std::unique_lock lock(workerMutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      return;
    }
    const size_t before = isClosed_ ? 0 : transport_.operationsInFlight();
    runQueueLocked();
    // An operation that did not complete at once needs a driver. A sleeping thread does not see that another one
    // started it.
    const bool needsDriver = !isClosed_ && transport_.operationsInFlight() > before;
    std::unique_ptr<EventBatch> events = client_.takeEventsWithWorkerLock();
    lock.unlock();
    if (needsDriver && sleepers_.load() != 0) {
      wake();
    }
    dispatch(std::move(events));
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

std::unique_lock<WorkerMutex> Progress::lockWorker() {
  lockWaiters_.fetch_add(1);
  std::unique_lock lock(workerMutex_);
  lockWaiters_.fetch_sub(1);
  return lock;
}

// How a drive ends, and what then keeps the invariants of the header:
//
//   it ends because                          returns  the transport is
//   events are there, no other driver sleeps events   left to this thread: a caller comes back, and while a leader runs
//                                                     tasks the executor has another thread lead
//   a caller has events that cannot block    events   the same: it comes back at once
//   events are there, another driver sleeps  events   armed, or unarmed and polled; if neither, a sleeper is woken
//   it is done, and arm() has failed         null     not armed, so a sleeper is woken
//   it is done, interrupted, or not needed   null     armed
//   it is closed                             null     not touched any more
std::unique_ptr<EventBatch> Progress::drive(Role role, IsDone& isDone) {
  std::unique_ptr<EventBatch> brought;
  bool mustWake = false; // once the lock is free, wake a thread to drive
  bool wasWoken = false; // wake() has woken this thread, which has found nothing since: see rest()
  int rounds = 0;
  if (role == Role::kWaitingCaller) {
    hasWaitingCaller_.store(true);
  }
  drivers_.fetch_add(1);
  drives_.fetch_add(1);
  std::unique_lock lock = lockWorker();
  unarmedSince_.store(0); // this thread is back: a leader that polls need not take over
  if (leftAt != Clock::time_point{}) {
    spinning_.wasAway(role, Clock::now() - leftAt);
  }
  Spinning::Wait wait(spinning_, role);
  Clock::time_point movedAt = Clock::now(); // when something moved last, see yieldFor()
  while (!isClosed_) {
    runQueueLocked();
    const unsigned advances = advanceLocked();
    client_.startDeferredWithWorkerLock();
    if (client_.hasEventsWithWorkerLock()) {
      // A leader leaves the transport to another driver, if one sleeps. So does a waiting caller that may be away for
      // long. The leaving thread takes along the events that would wake the other at once.
      if ((role == Role::kLeader || client_.mayEventsBlockWithWorkerLock()) && sleepers_.load() != 0) {
        if (leaveUnarmedLocked(role)) {
          mustWake = !isPolledUnarmed_.load();
        } else if (!transport_.arm()) {
          mustWake = ++rounds == kMaxRounds;
          if (!mustWake) {
            continue;
          }
        }
      }
      mustWake = mustWake || (wasWoken && isWaitingCallerAsleep_.load()); // see rest()
      leftAt = wait.end();
      brought = client_.takeEventsWithWorkerLock();
      break;
    }
    if (advances != 0) {
      movedAt = Clock::now();
    }
    // A request to look at deferred work is not the awaited event, nor a sign of it. While a device works, the timer
    // makes such a request every 50 us.
    if (advances != 0 || queued_.load() != 0) {
      wait.again();
      continue;
    }
    if (hasPending()) {
      continue;
    }
    // A spinning thread keeps the lock, so one thread spins for all. It is the waiting caller, if there is one.
    const bool isCallersTurn = role == Role::kLeader && hasWaitingCaller_.load();
    if (lockWaiters_.load() == 0 && !isCallersTurn && !isDone() && wait.spin(awaitedLocked())) {
      if (++spins_ % kSpinsBetweenLooks == 0) {
        queueWatches();
      }
      continue;
    }
    if (!transport_.arm()) {
      // Something has come, or waits for room on the other side. No thread may sleep for either: the other side may
      // need this core, or never make room again because its process has ended or is stopped.
      queueWatches();
      lock.unlock();
      yieldFor(Clock::now() - movedAt);
      if (isDone()) {
        mustWake = true; // the transport is not armed, so another thread must drive
        break;
      }
      lock = lockWorker();
      continue;
    }
    ++sleepers_;
    if (role == Role::kWaitingCaller) {
      isWaitingCallerAsleep_.store(true);
    }
    lock.unlock();
    // From here on a submitter gets the lock. An operation that was queued before the release of the lock is seen now.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool isOver = isDone() || (!hasPending() && !rest(role, isDone, wasWoken));
    if (role == Role::kWaitingCaller) {
      isWaitingCallerAsleep_.store(false);
    }
    --sleepers_;
    if (isOver) {
      drivers_.fetch_sub(1);
      return brought; // the transport is armed; endDriving() or close() runs operations that isDone() left in the queue
    }
    lock = lockWorker();
    unarmedSince_.store(0);
  }
  drivers_.fetch_sub(1);
  if (lock.owns_lock()) {
    lock.unlock();
  }
  if (mustWake) {
    wake();
  }
  drainQueue();
  return brought;
}

// How a rest ends. False ends the drive; after true the thread looks again.
//
//   waiting caller  false  a signal has come in, its deadline, or the end of the longest sleep
//                   true   woken by anything else
//   leader          false  at once: another leader sleeps, and so does a waiting caller
//                   true   woken, or the longest sleep is over; then, where need be, after pollUnarmed()
//
// A leader polls if a driver has left in between, or if it has passed a wake-up on. pollUnarmed() ends when a driver is
// away for long, when the other drivers have armed and gone, when there is something to do here, or when no driver has
// left for kQuietRounds rounds. This thread drives then, and so takes over or arms.
bool Progress::rest(Role role, IsDone& isDone, bool& wasWoken) {
  if (role == Role::kWaitingCaller) {
    // After kForNothing the waiting caller's thread looks for Ctrl-C, and then drives again.
    return sleep(callerDeadline_) != WaitSet::Slept::kForNothing;
  }
  const bool isCallerAsleep = isWaitingCallerAsleep_.load();
  // The wake-up may have been meant for the waiting caller. This thread goes on to pollUnarmed(), which does not wait
  // on the wait set, and so cannot take the wake-up again.
  const bool mustPassOn = std::exchange(wasWoken, false) && isCallerAsleep;
  if (mustPassOn) {
    wake();
  }
  if (isCallerAsleep && leadersAsleep_.load() != 0) {
    return false; // the other leader suffices, and a third sleeper would be woken before the caller
  }
  ++leadersAsleep_;
  const uint64_t absences = absences_.load();
  if (!mustPassOn) {
    wasWoken = sleep() == WaitSet::Slept::kUntilWoken;
  }
  if (mustPassOn || absences_.load() != absences) {
    pollUnarmed(isDone);
  }
  --leadersAsleep_;
  return true;
}

bool Progress::leaveUnarmedLocked(Role who) {
  // Without a sleeping leader, no thread would poll while the transport is unarmed.
  if (leadersAsleep_.load() == 0 || !spinning_.isBackSoon(who)) {
    return false;
  }
  // The count makes the sleeping leader poll once it is woken (see rest()).
  unarmedSince_.store(Clock::now().time_since_epoch().count());
  absences_.fetch_add(1);
  return true;
}

void Progress::pollUnarmed(IsDone& isDone) {
  isPolledUnarmed_.store(true);
  uint64_t absences = absences_.load();
  uint64_t drives = drives_.load();
  for (int quiet = 0; quiet < kQuietRounds; ++quiet) {
    std::this_thread::sleep_for(kUnarmedPeriod);
    queueWatches();
    const Time since = unarmedSince_.load();
    const bool isAway =
        since != 0 && Clock::now().time_since_epoch() - Clock::duration(since) > Spinning::kShortAbsence;
    // Only leaders that rest are left: the others have armed the transport and gone. In a loop of calls the caller is
    // away for moments, and comes back between two looks.
    const uint64_t drivesNow = drives_.load();
    const bool isUnattended = since == 0 && drivesNow == drives && drivers_.load() == leadersAsleep_.load();
    drives = drivesNow;
    if (isAway || isUnattended || isDone() || hasPending()) {
      break;
    }
    if (const uint64_t now = absences_.load(); now != absences) {
      absences = now;
      quiet = 0;
    }
  }
  // A driver that leaves now, and has seen `true`, wakes no thread. It need not: this thread drives next.
  isPolledUnarmed_.store(false);
}

WaitSet::Slept Progress::sleep(WaitSet::Clock::time_point until) {
  const WaitSet::Slept slept = waitSet_.sleep(until);
  if (slept == WaitSet::Slept::kUntilReadable) {
    queueWatches();
  }
  return slept;
}

void Progress::queueWatches() {
  std::vector<Operation> readable = waitSet_.takeReadable();
  if (readable.empty()) {
    return;
  }
  const std::lock_guard lock(queueMutex_);
  for (Operation& operation : readable) {
    queue_.push_back(std::move(operation));
    queued_.fetch_add(1);
  }
}

bool Progress::driveUntil(IsDone isDone, std::optional<uint64_t> awaitedCall, WaitSet::Clock::time_point deadline) {
  const std::unique_lock waitingCaller(waitingCallerMutex_, std::try_to_lock);
  if (!waitingCaller.owns_lock()) {
    return false;
  }
  callerDeadline_ = deadline;
  const Driver driver{Role::kWaitingCaller, awaitedCall};
  while (!isDone()) {
    std::unique_ptr<EventBatch> events = drive(Role::kWaitingCaller, isDone);
    if (events == nullptr) {
      break; // done, interrupted or closed: the table before drive() has all exits
    }
    events->dispatch(driver);
  }
  endDriving();
  return true;
}

void Progress::endDriving() {
  if (!hasWaitingCaller_.exchange(false)) {
    return; // this thread has not driven: isDone() was true at once
  }
  // This caller has its answer, so it does not wait for the lock. If it cannot leave the transport guarded, it wakes
  // another thread to drive. It also does so if the lock is taken: the holder may be a submitter, which never drives.
  bool isGuarded = false;
  std::unique_ptr<EventBatch> events;
  {
    const std::unique_lock lock(workerMutex_, std::try_to_lock);
    if (lock.owns_lock() && !isClosed_) {
      if (leaveUnarmedLocked(Role::kWaitingCaller)) {
        isGuarded = isPolledUnarmed_.load();
      } else {
        for (int round = 0; !isGuarded && round < kMaxRounds; ++round) {
          isGuarded = transport_.arm();
          if (!isGuarded) {
            (void)advanceLocked();
            client_.startDeferredWithWorkerLock();
          }
        }
      }
      events = client_.takeEventsWithWorkerLock();
    }
  }
  if (!isGuarded) {
    wake();
  }
  dispatch(std::move(events));
  drainQueue();
}

void Progress::close(Operation last) {
  std::unique_ptr<EventBatch> events;
  {
    const std::unique_lock lock = lockWorker();
    runQueueLocked(); // these may still wait for the thread that must run them
    last();
    isClosed_ = true;
    events = client_.takeEventsWithWorkerLock();
  }
  dispatch(std::move(events));
  wake();
  drainQueue();
}

} // namespace torch_ucx_rpc
