#include "runtime/wait_set.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Every sleep is bounded: a lost wake-up, should there be one, costs this much.
constexpr auto kLongestSleep = std::chrono::milliseconds(500);

// The user data of events in the set.
enum Event : uint64_t { kTransport, kWake, kWatched };

int checked(int fd, const char* what) {
  if (fd < 0) {
    throw std::runtime_error(
        std::string(what) + " failed: " + std::strerror(errno) + "; raise the limit of open files (ulimit -n)");
  }
  return fd;
}

void add(int epollFd, int fd, uint32_t events, uint64_t data) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  checked(epoll_ctl(epollFd, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

} // namespace

WaitSet::Descriptor::Descriptor(int fd, const char* what) : fd(checked(fd, what)) {}

WaitSet::Descriptor::~Descriptor() {
  ::close(fd);
}

WaitSet::WaitSet(int transportFd)
    : epoll_(epoll_create1(EPOLL_CLOEXEC), "epoll_create1"),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd"),
      watched_(epoll_create1(EPOLL_CLOEXEC), "epoll_create1") {
  add(epoll_.fd, wake_.fd, EPOLLIN | EPOLLET, kWake);
  add(epoll_.fd, watched_.fd, EPOLLIN | EPOLLET, kWatched);
  add(epoll_.fd, transportFd, EPOLLIN | EPOLLET, kTransport);
}

WaitSet::Slept WaitSet::sleep(Clock::time_point until) {
  epoll_event event;
  const Clock::duration left = std::clamp<Clock::duration>(until - Clock::now(), Clock::duration(0), kLongestSleep);
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(left);
  // One event at a time: the next event is for the next sleeper.
  if (epoll_wait(epoll_.fd, &event, 1, static_cast<int>(limit.count())) <= 0) {
    return Slept::kForNothing;
  }
  switch (event.data.u64) {
    case kWake:
      return Slept::kUntilWoken;
    case kWatched:
      return Slept::kUntilReadable;
    default:
      return Slept::kUntilTransport;
  }
}

void WaitSet::wake() {
  // The counter is never read: with edge triggering each write is an event of its own.
  const uint64_t one = 1;
  (void)!write(wake_.fd, &one, sizeof(one));
}

void WaitSet::watch(int fd, Operation onReadable) {
  const std::lock_guard lock(mutex_);
  // The index is the user data, so an entry keeps its place. EPOLLONESHOT makes the kernel report a descriptor once: it
  // stays readable, but takeReadable() takes its operation out.
  if (freeWatches_.empty()) {
    watches_.emplace_back();
    freeWatches_.push_back(watches_.size() - 1);
  }
  const size_t index = freeWatches_.back(); // free until the kernel watches
  add(watched_.fd, fd, EPOLLIN | EPOLLONESHOT, index);
  watches_[index] = std::move(onReadable);
  freeWatches_.pop_back();
}

std::vector<WaitSet::Operation> WaitSet::takeReadable() {
  std::vector<Operation> readable;
  epoll_event events[16];
  int found = 0;
  do {
    found = epoll_wait(watched_.fd, events, static_cast<int>(std::size(events)), 0);
    const std::lock_guard lock(mutex_);
    for (int event = 0; event < found; ++event) {
      const size_t index = events[event].data.u64;
      readable.push_back(std::move(watches_[index]));
      freeWatches_.push_back(index);
    }
  } while (found == static_cast<int>(std::size(events)));
  return readable;
}

} // namespace torch_ucx_rpc
