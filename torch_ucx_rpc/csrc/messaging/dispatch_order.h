#pragma once

#include "base/unique_function.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Runs actions of several threads in one order. A thread begins a turn under some lock, releases that lock, and ends
// the turn with an action. Actions run in the order of the turns, one at a time. The thread that ends a turn runs its
// action, or leaves it to a thread that runs other actions or ends an earlier turn. An action must not throw.
// Thread-safe; must outlive its turns.
class DispatchOrder {
 public:
  class Turn {
   public:
    Turn() = default; // no turn
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

    // Ends the turn, with or without an action. The destructor ends it without one.
    void end(UniqueFunction<void()> action = {}) {
      if (DispatchOrder* order = std::exchange(order_, nullptr)) {
        order->end(number_, std::move(action));
      }
    }

   private:
    DispatchOrder* order_ = nullptr;
    uint64_t number_ = 0;
  };

  // Begins the next turn.
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
    // The thread that runs actions looks for more, with the lock, before it stops. So it finds this one.
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
  std::vector<uint64_t> open_; // turns that have not ended, ascending
  std::map<uint64_t, UniqueFunction<void()>> waiting_; // actions of ended turns
  bool isRunning_ = false; // a thread runs waiting actions
};

} // namespace torch_ucx_rpc
