#pragma once

#include "memory/device_streams.h"

#include <atomic>
#include <forward_list>
#include <mutex>
#include <utility>

namespace torch_ucx_rpc {

// The devices of this worker that RPC uses besides the CPU, all of one type. Every message reads the list, which hardly
// ever changes. Thread-safe.
class DevicesInUse {
 public:
  // The reference stays valid, and its list unchanged, for as long as this object lives.
  const Devices& get() const {
    return *latest_.load();
  }

  void set(Devices devices) {
    const std::lock_guard lock(mutex_);
    if (lists_.front() != devices) {
      lists_.push_front(std::move(devices));
      latest_.store(&lists_.front());
    }
  }

 private:
  std::mutex mutex_;
  std::forward_list<Devices> lists_{{}}; // the latest first; guarded by mutex_; each list is constant
  std::atomic<const Devices*> latest_{&lists_.front()};
};

} // namespace torch_ucx_rpc
