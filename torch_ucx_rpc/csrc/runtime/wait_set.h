#pragma once

#include "base/unique_function.h"

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Lets drivers sleep, and wakes them for signals of the transport, for wake-ups, and for watched file descriptors.
// Thread-safe.
//
// All drivers sleep on one epoll set, edge triggered. For each event the kernel wakes one sleeper, the one that went to
// sleep last: ep_poll() queues waiters exclusively, at the head. Progress relies on this.
class WaitSet {
 public:
  using Operation = UniqueFunction<void()>;

  // Throws std::runtime_error if the process may open no more files. `transportFd` stays the caller's.
  explicit WaitSet(int transportFd);

  using Clock = std::chrono::steady_clock;

  // Why a sleep ended. kForNothing: the process got a signal, half a second has passed, or `until` has come.
  enum class Slept : uint8_t { kForNothing, kUntilWoken, kUntilTransport, kUntilReadable };
  Slept sleep(Clock::time_point until = Clock::time_point::max());

  // Wakes the sleeper that went to sleep last; without one, the next sleep ends at once.
  void wake();

  // Keeps an operation until a file descriptor becomes readable; takeReadable() then returns it, once. The descriptor
  // stays the caller's.
  void watch(int fd, Operation onReadable);
  // The operations of watched descriptors that have become readable. Never sleeps.
  std::vector<Operation> takeReadable();

 private:
  // A descriptor that is closed with the set, also if the set's constructor throws.
  struct Descriptor {
    Descriptor(int fd, const char* what);
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    const int fd;
  };

  const Descriptor epoll_;
  const Descriptor wake_;
  const Descriptor watched_; // a separate epoll set, so that a thread that does not sleep can check it too

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Operation> watches_; // watched_ knows them by their index
  std::vector<size_t> freeWatches_; // the indices without an operation
};

} // namespace torch_ucx_rpc
