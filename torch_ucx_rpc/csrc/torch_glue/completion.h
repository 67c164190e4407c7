#pragma once

#include <exception>

namespace torch_ucx_rpc {

// Completes a future, and so runs its callbacks. torch's own callbacks may throw: an RRef's callback does if the RRef's
// owner has died. Any use of that RRef raises the error. An exception that leaves this function would end the process,
// so it is dropped. It is not logged either: all calls to a dying worker may end here, and making the text of a torch
// exception takes milliseconds under a lock of the dynamic linker.
template <typename Complete>
void runCallbacks(const Complete& complete) {
  try {
    complete();
  } catch (const std::exception&) {
  }
}

} // namespace torch_ucx_rpc
