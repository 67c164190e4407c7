#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstdint>
#include <unordered_set>

// Whether this UCX can use memory of CUDA devices, and share it. Nothing here needs a CUDA toolkit: the functions ask
// the driver, if it is loaded.
namespace torch_ucx_rpc {

struct UcpLibrary; // ucp_transport.h

// Whether UCX's cuda_ipc can give other processes of this machine access to these bytes of a CUDA device. It can if the
// driver has a legacy IPC handle for them and they lie in one allocation. That holds for memory of cudaMalloc, so for
// torch's allocator and RMM's default resources. It does not hold for cudaMallocAsync, nor for CUDA's virtual memory
// management (torch's expandable_segments). The published wheels are built without handles for the latter. A UCX that
// has them sends one handle where such a tensor needs several (https://github.com/openucx/ucx/issues/11283). Bytes that
// cannot be shared travel in another, slower way, without a warning of UCX.
//
// True if there is no driver, or the driver does not know the address. Any thread may call it.
bool canShareDeviceMemory(const void* address, uint64_t bytes);

// Whether this context has cuda_ipc, which the user may have excluded with UCX_TLS. Without it UCX would send device
// memory through host memory, in pieces of 8 KiB.
bool hasCudaIpc(ucp_context_h context);

// Returns an error for the user if a UCX with these abilities must not get memory of CUDA devices. No error if it may.
// A UCX that has not found the driver takes device memory for host memory. The process then ends with SIGSEGV on the
// first tensor. The cuda_ipc of UCX 1.21 is broken.
Error deviceMemoryRefusal(const UcpLibrary& library, bool hasCuda, bool hasCudaIpc);

// Returns an error for the user if UCX takes these bytes of a CUDA device for host memory. UCX keeps a cache of
// allocations. UCX 1.22 takes memory that is missing there for host memory, whatever a send or receive says. The
// process would then end with SIGSEGV. Takes some microseconds.
Error deviceMemoryMistaken(ucp_context_h context, const void* address, uint64_t bytes);

// Decides which memory of CUDA devices a context may get. Needs the worker lock, except canShare() and refusal().
class DeviceMemoryAccess {
 public:
  DeviceMemoryAccess() = default; // to be replaced once there is a context
  explicit DeviceMemoryAccess(ucp_context_h context);

  // See canShareDeviceMemory().
  bool canShare(const void* address, uint64_t bytes) const {
    return hasCudaIpc_ && !refusal_ && canShareDeviceMemory(address, bytes);
  }
  // See deviceMemoryRefusal().
  const Error& refusal() const {
    return refusal_;
  }
  // Why UCX must not get these bytes, for one of the reasons above; no error if it may. Checks each region of a device
  // once, since allocators keep their regions.
  const Error& refusalOf(const void* address, uint64_t bytes);

 private:
  ucp_context_h context_ = nullptr;
  bool hasCudaIpc_ = false;
  Error refusal_;
  Error mistaken_; // what is wrong with the bytes that refusalOf() checked last
  std::unordered_set<uintptr_t> knownRegions_;
};

} // namespace torch_ucx_rpc
