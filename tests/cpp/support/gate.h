#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace torch_ucx_rpc {

// Blocks threads until it is opened, and counts them.
class Gate {
 public:
  ~Gate() {
    open();
  }

  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [this] { return isOpen_; });
    --waiting_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    isOpen_ = true;
    changed_.notify_all();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    isOpen_ = false;
  }
  size_t waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool isOpen_ = false;
  size_t waiting_ = 0;
};

} // namespace torch_ucx_rpc
