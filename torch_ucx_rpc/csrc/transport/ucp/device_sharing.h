#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstdint>

// The abilities of this UCX with memory of CUDA devices. Nothing here needs a CUDA toolkit: the driver is asked where
// it is loaded.
namespace torch_ucx_rpc {

struct UcpLibrary;

// Whether UCX's cuda_ipc can give other processes of this machine access to these bytes of a CUDA device. It can where
// the driver has a legacy IPC handle for them and they lie in one allocation: cudaMalloc's, hence those of torch's
// allocator and of RMM's default resources. It cannot for cudaMallocAsync's, nor for those of CUDA's virtual memory
// management (torch's expandable_segments): the published wheels are built without handles for the latter, and a UCX
// that has them sends one handle where such a tensor needs several (https://github.com/openucx/ucx/issues/11283). Such
// bytes travel another, slower way, without a word.
//
// True where there is no driver, or it does not know the address. Any thread may call it.
bool canShareDeviceMemory(const void* address, uint64_t bytes);

// Whether this context has cuda_ipc, which the user may have excluded with UCX_TLS. Without it device memory goes
// through the host's, in pieces of 8 KiB.
bool hasCudaIpc(ucp_context_h context);

// Says to the user why UCX must not be given memory of CUDA devices. No error where it may. A UCX that has not found
// the driver takes device memory for the host's, and the process ends with SIGSEGV on the first tensor; the cuda_ipc of
// UCX 1.21 is broken.
Error deviceMemoryRefusal(ucp_context_h context);
// The same of a UCX that has what the flags say.
Error deviceMemoryRefusal(const UcpLibrary& library, bool hasCuda, bool hasCudaIpc);

// Says to the user that UCX takes these bytes of a CUDA device for the host's, and what to do; no error where it does
// not. UCX keeps a cache of allocations. Memory that is missing there is the host's to UCX, whatever it is told with a
// send or receive (1.22), and the process would end with SIGSEGV. Takes some microseconds.
Error deviceMemoryMistaken(ucp_context_h context, const void* address, uint64_t bytes);

} // namespace torch_ucx_rpc
