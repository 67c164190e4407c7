#pragma once

namespace torch_ucx_rpc {

// Whether UCX's cuda_ipc can give other processes of this machine access to the memory at this address of a CUDA device. It cannot
// for that of cudaMallocAsync, and before UCX 1.22 not for that of CUDA's virtual memory management (torch's expandable_segments): such
// bytes travel another, slower way, without a word. Asks the driver; where there is none, or it does
// not know the address, nothing speaks against it. For any thread.
bool canShareDeviceMemory(const void* address);

} // namespace torch_ucx_rpc
