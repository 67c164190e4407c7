#pragma once

#include <exception>

// How futures are completed.
namespace torch_ucx_rpc {

// Completes a future, and so runs its callbacks. Torch's own may throw: that of an RRef does, which its owner died over. Whoever
// uses that RRef is told; here is nobody to tell, and an exception would end the process. (Not for the log either: the text of one of
// torch's takes milliseconds, under a lock of the dynamic linker, and all calls to a worker that dies may end so.)
template <typename Complete>
void runCallbacks(const Complete& complete) {
  try {
    complete();
  } catch (const std::exception&) {
  }
}

} // namespace torch_ucx_rpc
