#include "agent/progress.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

namespace torch_ucx_rpc {

namespace {

// No wait is unbounded: should a wake-up be lost for a reason nobody thought of, this is what it costs.
constexpr auto kLongestSleep = std::chrono::milliseconds(500);

int checked(int fd, const char* what) {
  if (fd < 0) {
    throw std::runtime_error(
        std::string(what) + " failed: " + std::strerror(errno) + "; raise the limit of open files (ulimit -n)");
  }
  return fd;
}

// How long what arrives may lie while the transport is patrolled; and after how many rounds in which nobody was away that ends.
constexpr auto kPatrol = std::chrono::milliseconds(1);
constexpr int kQuietRounds = 20;

// How often a leader that has something looks for more, before it leaves the rest to another.
constexpr int kMostRounds = 8;

using Clock = Spinning::Clock;
// When this thread last left drive() to go about other things.
thread_local Clock::time_point leftAt{};

// What an event of the epoll set carries.
enum Event : uint64_t { kTransport, kWake, kWatches };

// While nobody sleeps: every how many spins somebody looks at the watched descriptors.
constexpr unsigned kSpinsBetweenLooks = 1024;

void addToEpoll(int epollFd, int fd, uint32_t events, uint64_t data) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  checked(epoll_ctl(epollFd, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

} // namespace

Progress::Progress(Transport& transport, Operation settle, UniqueFunction<void(Deliveries)> dispatch, Waiting waiting)
    : transport_(transport), settle_(std::move(settle)), dispatch_(std::move(dispatch)), spinning_(waiting) {
  epollFd_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  wakeFd_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  watchesFd_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  addToEpoll(epollFd_, wakeFd_, EPOLLIN | EPOLLET, kWake);
  addToEpoll(epollFd_, watchesFd_, EPOLLIN | EPOLLET, kWatches);
  addToEpoll(epollFd_, transport_.eventFd(), EPOLLIN | EPOLLET, kTransport);
}

Progress::~Progress() {
  ::close(epollFd_);
  ::close(watchesFd_);
  ::close(wakeFd_);
}

void Progress::settleAgain() {
  const std::lock_guard lock(queueMutex_);
  queue_.emplace_back([] {});
  queued_.fetch_add(1);
}

void Progress::submit(Operation operation) {
  {
    const std::lock_guard lock(queueMutex_);
    queue_.push_back(std::move(operation));
    queued_.fetch_add(1);
  }
  runLeftovers();
}

void Progress::run(Operation operation) {
  Deliveries brought;
  {
    const std::unique_lock lock = lockWorker();
    operation();
    brought = takeDeliveriesLocked();
  }
  if (!brought.empty()) {
    dispatch_(std::move(brought));
  }
  runLeftovers();
}

Deliveries Progress::takeDeliveriesLocked() {
  Deliveries taken;
  if (!deliveries_.empty()) {
    std::swap(taken, deliveries_);
    taken.turn = turns_.begin();
  }
  return taken;
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
  if (!isClosed_) {
    settle_();
  }
}

void Progress::runLeftovers() {
  // A thread that queues and finds the lock taken leaves its operation to the holder; the holder looks here after
  // unlocking. The fence makes sure that one of the two sees the other: queued before try_lock there, unlocked before
  // this load here.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (queued_.load() != 0) {
    std::unique_lock lock(workerMutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      return;
    }
    const size_t before = isClosed_ ? 0 : transport_.operationsInFlight();
    runQueueLocked();
    // What did not complete at once needs someone to drive it, and a thread asleep does not see what another started.
    const bool needsDriver = !isClosed_ && transport_.operationsInFlight() > before;
    Deliveries brought = takeDeliveriesLocked();
    lock.unlock();
    if (needsDriver && sleepers_.load() != 0) {
      wake();
    }
    if (!brought.empty()) {
      dispatch_(std::move(brought));
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

std::unique_lock<std::mutex> Progress::lockWorker() {
  lockWaiters_.fetch_add(1);
  std::unique_lock lock(workerMutex_);
  lockWaiters_.fetch_sub(1);
  return lock;
}

Deliveries Progress::drive(Role role, IsDone& isDone) {
  Deliveries brought;
  bool mustWake = false;
  bool wasWoken = false;
  int rounds = 0;
  if (role == Role::kVisitor) {
    isVisited_.store(true);
  }
  std::unique_lock lock = lockWorker();
  awaySince_.store(0);
  if (leftAt != Clock::time_point{}) {
    spinning_.wasAway(role, Clock::now() - leftAt);
  }
  Spinning::Wait wait(spinning_, role);
  while (!isClosed_) {
    runQueueLocked();
    const unsigned events = transport_.progress();
    settle_();
    if (!deliveries_.empty()) {
      // A leader leaves the guard to another one, if there is one, and takes along what that would be woken for at once.
      if (role == Role::kLeader && sleepers_.load() != 0) {
        if (leaveToPatrolLocked(role)) {
          mustWake = !isPatrolled_.load();
        } else if (!transport_.arm()) {
          mustWake = ++rounds == kMostRounds;
          if (!mustWake) {
            continue;
          }
        }
      }
      mustWake = mustWake || (wasWoken && isVisitorAsleep_.load()); // see rest()
      leftAt = wait.end();
      brought = takeDeliveriesLocked();
      break;
    }
    if (events != 0 || queued_.load() != 0) {
      wait.again();
      continue;
    }
    const bool isVisitorsTurn = role == Role::kLeader && isVisited_.load(); // it spins for everybody
    if (lockWaiters_.load() == 0 && !isVisitorsTurn && !isDone() && wait.spin(transport_.operationsInFlight() != 0)) {
      if (++spins_ % kSpinsBetweenLooks == 0) {
        queueWatches();
      }
      continue;
    }
    if (!transport_.arm()) {
      // Something has come, or waits for room on the other side, which cannot be slept for: the other side may need this core,
      // or never make room again, because its process has ended.
      queueWatches();
      lock.unlock();
      sched_yield();
      if (isDone()) {
        mustWake = true; // not armed
        break;
      }
      lock = lockWorker();
      continue;
    }
    ++sleepers_;
    if (role == Role::kVisitor) {
      isVisitorAsleep_.store(true);
    }
    lock.unlock();
    // From here on a submitter gets the lock, or has queued before we unlocked and is seen now.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool isOver = isDone() || (queued_.load() == 0 && !rest(role, isDone, wasWoken));
    if (role == Role::kVisitor) {
      isVisitorAsleep_.store(false);
    }
    --sleepers_;
    if (isOver) {
      return brought; // armed
    }
    lock = lockWorker();
    awaySince_.store(0);
  }
  if (lock.owns_lock()) {
    lock.unlock();
  }
  if (mustWake) {
    wake();
  }
  runLeftovers();
  return brought;
}

bool Progress::rest(Role role, IsDone& isDone, bool& wasWoken) {
  if (role == Role::kVisitor) {
    return sleep() != Slept::kForNothing;
  }
  const bool isVisitorAsleep = isVisitorAsleep_.load();
  // Who woke this thread may have meant the visitor. On patrol, below, it does not intercept that again.
  const bool mustPassOn = std::exchange(wasWoken, false) && isVisitorAsleep;
  if (mustPassOn) {
    wake();
  }
  if (isVisitorAsleep && leadersAsleep_.load() != 0) {
    return false; // the other leader suffices
  }
  ++leadersAsleep_;
  const uint64_t absences = absences_.load();
  if (!mustPassOn) {
    wasWoken = sleep() == Slept::kUntilWoken;
  }
  if (mustPassOn || absences_.load() != absences) {
    patrol(isDone);
  }
  --leadersAsleep_;
  return true;
}

bool Progress::leaveToPatrolLocked(Role who) {
  if (leadersAsleep_.load() == 0 || !spinning_.isBackSoon(who)) {
    return false;
  }
  awaySince_.store(Clock::now().time_since_epoch().count());
  absences_.fetch_add(1);
  return true;
}

void Progress::patrol(IsDone& isDone) {
  isPatrolled_.store(true);
  uint64_t absences = absences_.load();
  for (int quiet = 0; quiet < kQuietRounds; ++quiet) {
    std::this_thread::sleep_for(kPatrol);
    queueWatches();
    const Time since = awaySince_.load();
    const bool isAway =
        since != 0 && Clock::now().time_since_epoch() - Clock::duration(since) > Spinning::kShortAbsence;
    if (isAway || isDone() || queued_.load() != 0) {
      break;
    }
    if (const uint64_t now = absences_.load(); now != absences) {
      absences = now;
      quiet = 0;
    }
  }
  isPatrolled_.store(false);
}

Progress::Slept Progress::sleep() {
  epoll_event event;
  if (epoll_wait(epollFd_, &event, 1, static_cast<int>(kLongestSleep.count())) <= 0) {
    return Slept::kForNothing;
  }
  if (event.data.u64 == kWake) {
    return Slept::kUntilWoken;
  }
  if (event.data.u64 == kWatches) {
    queueWatches();
  }
  return Slept::kUntilEvent;
}

void Progress::wake() {
  // Never read: with edge triggering each write is an event of its own.
  const uint64_t one = 1;
  (void)!write(wakeFd_, &one, sizeof(one));
}

void Progress::watch(int fd, Operation onReadable) {
  const std::lock_guard lock(queueMutex_);
  watches_.push_back(std::move(onReadable));
  addToEpoll(watchesFd_, fd, EPOLLIN | EPOLLONESHOT, watches_.size() - 1);
}

void Progress::queueWatches() {
  epoll_event events[16];
  int found = 0;
  do {
    found = epoll_wait(watchesFd_, events, static_cast<int>(std::size(events)), 0);
    const std::lock_guard lock(queueMutex_);
    for (int event = 0; event < found; ++event) {
      queue_.push_back(std::move(watches_[events[event].data.u64]));
      queued_.fetch_add(1);
    }
  } while (found == static_cast<int>(std::size(events)));
}

void Progress::leave() {
  isVisited_.store(false);
  bool isGuarded = false;
  Deliveries brought;
  {
    const std::unique_lock lock(workerMutex_, std::try_to_lock);
    if (lock.owns_lock() && !isClosed_) {
      if (leaveToPatrolLocked(Role::kVisitor)) {
        isGuarded = isPatrolled_.load();
      } else {
        for (int round = 0; !isGuarded && round < kMostRounds; ++round) {
          isGuarded = transport_.arm();
          if (!isGuarded) {
            (void)transport_.progress();
            settle_();
          }
        }
      }
      brought = takeDeliveriesLocked();
    }
  }
  if (!isGuarded) {
    wake();
  }
  if (!brought.empty()) {
    dispatch_(std::move(brought));
  }
  runLeftovers();
}

void Progress::close(Operation last) {
  Deliveries brought;
  {
    const std::unique_lock lock = lockWorker();
    last();
    isClosed_ = true;
    brought = takeDeliveriesLocked();
  }
  dispatch_(std::move(brought));
  wake();
  runLeftovers();
}

} // namespace torch_ucx_rpc
