#pragma once

#include <chrono>
#include <cmath>

namespace torch_ucx_rpc {

// Rounds to the nearest millisecond. Python and torch give seconds; everything below them counts milliseconds.
inline std::chrono::milliseconds toMilliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

} // namespace torch_ucx_rpc
