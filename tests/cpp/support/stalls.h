#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace torch_ucx_rpc {

// Measures by how much a sleeping thread of this process oversleeps. A busy machine causes that, so a test may let a
// time exceed its bound by as much.
class Stalls {
 public:
  Stalls()
      : thread_([this] {
          while (!isOver_.load()) {
            const auto due = std::chrono::steady_clock::now() + kPeriod;
            std::this_thread::sleep_until(due);
            const std::chrono::duration<double> late = std::chrono::steady_clock::now() - due - kHarmless;
            seconds_.store(seconds_.load() + std::max(0.0, late.count()));
          }
        }) {}
  ~Stalls() {
    isOver_.store(true);
    thread_.join();
  }

  // Returns all stalls so far together.
  double seconds() const {
    return seconds_.load();
  }

 private:
  static constexpr auto kPeriod = std::chrono::milliseconds(5);
  static constexpr auto kHarmless = std::chrono::milliseconds(50); // waits for a processor

  std::atomic<bool> isOver_{false};
  std::atomic<double> seconds_{0};
  std::thread thread_;
};

} // namespace torch_ucx_rpc
