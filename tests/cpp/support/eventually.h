#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace torch_ucx_rpc {

// Far longer than any step takes, even with sanitizers on a busy machine, and far below the limit of a hung test.
inline constexpr auto kPatience = std::chrono::seconds(30);

// Asks until the condition holds. Returns false if it does not hold in time. For states that no condition variable
// announces.
template <typename Condition>
[[nodiscard]] bool eventually(Condition condition, std::chrono::milliseconds patience = kPatience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1)); // between two questions
  }
  return true;
}

} // namespace torch_ucx_rpc
