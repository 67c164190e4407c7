#pragma once

#include "base/unique_function.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Keeps an order among threads that act on what they took, one after the other, under a lock that they have released since. What a
// thread ends its turn with runs when all turns that began earlier have ended too: here, or in the thread that ends the last of
// them. Thread-safe; must outlive its turns.
class Turns {
 public:
  class Turn {
   public:
    Turn() = default; // none
    Turn(Turns* turns, uint64_t number) : turns_(turns), number_(number) {}
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)), number_(other.number_) {}
    Turn& operator=(Turn&& other) noexcept {
      std::swap(turns_, other.turns_);
      std::swap(number_, other.number_);
      return *this;
    }
    ~Turn() {
      end();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    void end(UniqueFunction<void()> thereafter = {}) {
      if (Turns* turns = std::exchange(turns_, nullptr)) {
        turns->end(number_, std::move(thereafter));
      }
    }

   private:
    Turns* turns_ = nullptr;
    uint64_t number_ = 0;
  };

  Turn begin() {
    const std::lock_guard lock(mutex_);
    open_.push_back(++latest_);
    return {this, latest_};
  }

 private:
  using Thereafter = std::pair<uint64_t, UniqueFunction<void()>>; // after all turns up to this one

  void end(uint64_t number, UniqueFunction<void()> thereafter) {
    std::vector<Thereafter> due;
    {
      const std::lock_guard lock(mutex_);
      std::erase(open_, number);
      if (thereafter) {
        waiting_.emplace_back(number, std::move(thereafter));
      }
      std::erase_if(waiting_, [&](Thereafter& item) {
        const bool isDue = open_.empty() || item.first < open_.front();
        if (isDue) {
          due.push_back(std::move(item));
        }
        return isDue;
      });
    }
    for (Thereafter& item : due) {
      item.second();
    }
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  uint64_t latest_ = 0;
  std::vector<uint64_t> open_; // ascending
  std::vector<Thereafter> waiting_;
};

} // namespace torch_ucx_rpc
