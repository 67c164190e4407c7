#include "agent/progress.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

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

// How often a leader that has something looks for more, before it leaves the rest to another.
constexpr int kMostRounds = 8;

// What an event of the epoll set carries: this, or the index of a watch.
constexpr uint64_t kNoWatch = ~0ull;

void addToEpoll(int epollFd, int fd, uint32_t events, uint64_t data) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  checked(epoll_ctl(epollFd, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

} // namespace

Progress::Progress(
    Transport& transport, Operation settle, UniqueFunction<void(Deliveries)> dispatch, Waiting waiting)
    : transport_(transport), settle_(std::move(settle)), dispatch_(std::move(dispatch)), spinning_(waiting) {
  epollFd_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  wakeFd_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  addToEpoll(epollFd_, wakeFd_, EPOLLIN | EPOLLET, kNoWatch);
  addToEpoll(epollFd_, transport_.eventFd(), EPOLLIN | EPOLLET, kNoWatch);
}

Progress::~Progress() {
  ::close(epollFd_);
  ::close(wakeFd_);
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
    std::swap(brought, deliveries_);
  }
  if (!brought.empty()) {
    dispatch_(std::move(brought));
  }
  runLeftovers();
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
    Deliveries brought;
    std::swap(brought, deliveries_);
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
  const bool isLeader = role == Role::kLeader;
  bool wasWoken = false;
  bool mustWake = false;
  int rounds = 0;
  if (!isLeader) {
    isVisited_.store(true);
  }
  std::unique_lock lock = lockWorker();
  Spinning::Wait wait(spinning_, isLeader ? Spinning::Who::kLeader : Spinning::Who::kVisitor);
  while (!isClosed_) {
    runQueueLocked();
    const unsigned events = transport_.progress();
    settle_();
    if (!deliveries_.empty()) {
      // A leader leaves the guard to another one, if there is one, and takes along what it would be woken for at once.
      const bool isGuarded = isLeader && sleepers_.load() != 0;
      if (isGuarded && !transport_.arm() && ++rounds < kMostRounds) {
        continue;
      }
      mustWake = isGuarded && rounds == kMostRounds;
      wait.end();
      std::swap(brought, deliveries_);
      break;
    }
    if (events != 0 || queued_.load() != 0) {
      continue;
    }
    if (std::exchange(wasWoken, false) && isVisitorAsleep_.load()) {
      wake(); // it may have been meant for the visitor
    }
    // A visitor spins for everybody.
    if (lockWaiters_.load() == 0 && !(isLeader && isVisited_.load()) && !isDone() && wait.spin()) {
      continue;
    }
    if (!transport_.arm()) {
      continue;
    }
    sleepers_.fetch_add(1);
    if (!isLeader) {
      isVisitorAsleep_.store(true);
    }
    lock.unlock();
    // From here on a submitter gets the lock, or has queued before we unlocked and is seen now.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool isOver = isDone();
    bool isInterrupted = false;
    bool isSpare = false;
    if (!isOver && queued_.load() == 0) {
      isSpare = isLeader && isVisitorAsleep_.load() && leadersAsleep_.load() != 0;
      if (!isSpare) {
        leadersAsleep_.fetch_add(isLeader ? 1 : 0);
        isInterrupted = !sleep() && !isLeader;
        leadersAsleep_.fetch_sub(isLeader ? 1 : 0);
        wasWoken = isLeader;
      }
    }
    if (!isLeader) {
      isVisitorAsleep_.store(false);
    }
    sleepers_.fetch_sub(1);
    if (isOver || isInterrupted || isSpare) {
      return brought; // armed
    }
    lock = lockWorker();
  }
  lock.unlock();
  if (mustWake) {
    wake();
  }
  runLeftovers();
  return brought;
}

bool Progress::sleep() {
  epoll_event event;
  const int events = epoll_wait(epollFd_, &event, 1, static_cast<int>(kLongestSleep.count()));
  if (events > 0 && event.data.u64 != kNoWatch) {
    const std::lock_guard lock(queueMutex_);
    queue_.push_back(std::move(watches_[event.data.u64]));
    queued_.fetch_add(1);
  }
  // Other events need not be told apart: the caller looks at everything again.
  return events > 0;
}

void Progress::wake() {
  // Never read: with edge triggering each write is an event of its own.
  const uint64_t one = 1;
  (void)!write(wakeFd_, &one, sizeof(one));
}

void Progress::watch(int fd, Operation onReadable) {
  const std::lock_guard lock(queueMutex_);
  watches_.push_back(std::move(onReadable));
  addToEpoll(epollFd_, fd, EPOLLIN | EPOLLONESHOT, watches_.size() - 1);
}

void Progress::leave() {
  isVisited_.store(false);
  bool isArmed = false;
  {
    const std::unique_lock lock(workerMutex_, std::try_to_lock);
    isArmed = lock.owns_lock() && !isClosed_ && transport_.arm();
  }
  if (!isArmed) {
    wake();
  }
  runLeftovers();
}

void Progress::close(Operation last) {
  Deliveries brought;
  {
    const std::unique_lock lock = lockWorker();
    last();
    isClosed_ = true;
    std::swap(brought, deliveries_);
  }
  dispatch_(std::move(brought));
  wake();
  runLeftovers();
}

} // namespace torch_ucx_rpc
