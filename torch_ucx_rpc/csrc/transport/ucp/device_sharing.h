#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstdint>
#include <unordered_set>

// The abilities of this UCX with memory of CUDA devices. Nothing here needs a CUDA toolkit: the driver is asked where
// it is loaded.
namespace torch_ucx_rpc {

struct UcpLibrary; // ucp_transport.h

// Whether UCX's cuda_ipc can give other processes of this machine access to these bytes of a CUDA device. It can where
// the driver has a legacy IPC handle for them and they lie in one allocation: cudaMalloc's, hence those of torch's
// allocator and of RMM's default resources. It cannot for cudaMallocAsync's, nor for those of CUDA's virtual memory
// management (torch's expandable_segments): the published wheels are built without handles for the latter, and a UCX
// that has them sends one handle where such a tensor needs several (https://github.com/openucx/ucx/issues/11283). Such
// bytes travel in another, slower way, without a warning.
//
// True where there is no driver, or it does not know the address. Any thread may call it.
bool canShareDeviceMemory(const void* address, uint64_t bytes);

// Whether this context has cuda_ipc, which the user may have excluded with UCX_TLS. Without it device memory goes
// through the host's, in pieces of 8 KiB.
bool hasCudaIpc(ucp_context_h context);

// Says to the user why a UCX that has what the flags say must not be given memory of CUDA devices. No error where it
// may. A UCX that has not found the driver takes device memory for the host's, and the process ends with SIGSEGV on the
// first tensor; the cuda_ipc of UCX 1.21 is broken.
Error deviceMemoryRefusal(const UcpLibrary& library, bool hasCuda, bool hasCudaIpc);

// Says to the user that UCX takes these bytes of a CUDA device for the host's, and what to do; no error where it does
// not. UCX keeps a cache of allocations. Memory that is missing there counts as the host's for UCX, whatever a send or
// receive says (1.22), and the process would end with SIGSEGV. Takes some microseconds.
Error deviceMemoryMistaken(ucp_context_h context, const void* address, uint64_t bytes);

// The memory of CUDA devices that a context may get. Needs the worker lock, except canShare() and refusal().
class DeviceMemoryAccess {
 public:
  DeviceMemoryAccess() = default; // nothing, without a context
  explicit DeviceMemoryAccess(ucp_context_h context);

  // See canShareDeviceMemory().
  bool canShare(const void* address, uint64_t bytes) const {
    return hasCudaIpc_ && !refusal_ && canShareDeviceMemory(address, bytes);
  }
  // See deviceMemoryRefusal().
  const Error& refusal() const {
    return refusal_;
  }
  // Why these bytes must not be given to UCX: for one of the reasons above. Looks once at each region of a device,
  // since allocators keep theirs.
  const Error& refusalOf(const void* address, uint64_t bytes);

 private:
  ucp_context_h context_ = nullptr;
  bool hasCudaIpc_ = false;
  Error refusal_;
  Error mistaken_; // what is wrong with the last bytes that were asked for
  std::unordered_set<uintptr_t> knownRegions_;
};

} // namespace torch_ucx_rpc
