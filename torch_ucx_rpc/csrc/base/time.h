#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace torch_ucx_rpc {

// Longer times count as this one, 31 years. The limit of std::chrono::steady_clock is 292 years.
inline constexpr double kLongestSeconds = 1e9;

// Converts a time from Python or torch, in seconds. Zero stays zero, which mostly stands for "no limit". Times shorter
// than a millisecond become one millisecond, never zero. Infinity and times beyond kLongestSeconds become
// kLongestSeconds. Throws std::invalid_argument (Python's ValueError) for a negative time or NaN.
inline std::chrono::milliseconds toMilliseconds(double seconds) {
  if (!(seconds >= 0)) { // also true of NaN
    throw std::invalid_argument(
        "a timeout or another time must be 0 or more seconds, not " + std::to_string(seconds) +
        "; a timeout of 0 means no limit");
  }
  if (seconds == 0) {
    return std::chrono::milliseconds(0);
  }
  const int64_t milliseconds = std::llround(std::min(seconds, kLongestSeconds) * 1000);
  return std::chrono::milliseconds(std::max<int64_t>(milliseconds, 1));
}

} // namespace torch_ucx_rpc
