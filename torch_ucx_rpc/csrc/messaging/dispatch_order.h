#pragma once

#include "base/unique_function.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Keeps an order among threads that act on what they took, one after the other, under a lock that they have released
// since. What they end their turns with runs in the order of the turns, one at a time: here, or in another thread that
// is at it or that ends an earlier turn. It must not throw. Thread-safe; must outlive its turns.
class DispatchOrder {
 public:
  class Turn {
   public:
    Turn() = default; // none
    Turn(DispatchOrder* order, uint64_t number) : order_(order), number_(number) {}
    Turn(Turn&& other) noexcept : order_(std::exchange(other.order_, nullptr)), number_(other.number_) {}
    Turn& operator=(Turn&& other) noexcept {
      std::swap(order_, other.order_);
      std::swap(number_, other.number_);
      return *this;
    }
    ~Turn() {
      end();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    void end(UniqueFunction<void()> action = {}) {
      if (DispatchOrder* order = std::exchange(order_, nullptr)) {
        order->end(number_, std::move(action));
      }
    }

   private:
    DispatchOrder* order_ = nullptr;
    uint64_t number_ = 0;
  };

  Turn begin() {
    const std::lock_guard lock(mutex_);
    open_.push_back(++latest_);
    return {this, latest_};
  }

 private:
  void end(uint64_t number, UniqueFunction<void()> action) {
    std::unique_lock lock(mutex_);
    std::erase(open_, number);
    if (action) {
      waiting_.emplace(number, std::move(action));
    }
    if (isRunning_) {
      return;
    }
    isRunning_ = true;
    while (!waiting_.empty() && (open_.empty() || waiting_.begin()->first < open_.front())) {
      auto due = waiting_.extract(waiting_.begin());
      lock.unlock();
      due.mapped()();
      lock.lock();
    }
    isRunning_ = false;
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  uint64_t latest_ = 0;
  std::vector<uint64_t> open_; // ascending
  std::map<uint64_t, UniqueFunction<void()>> waiting_; // what turns have ended with
  bool isRunning_ = false; // some thread is at what was waiting
};

} // namespace torch_ucx_rpc
