#pragma once

#include <chrono>
#include <cmath>

namespace torch_ucx_rpc {

// Python and torch give seconds.
inline std::chrono::milliseconds toMilliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

} // namespace torch_ucx_rpc
