#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace torch_ucx_rpc {

// The allocator that torch uses for tensors on devices of this type. c10::GetAllocator() returns torch's own allocator
// even if torch.cuda.memory.change_current_allocator has replaced it. In that case torch's own allocator was never set
// up.
c10::Allocator* allocatorOf(const c10::DeviceType& type);

// Copies bytes into new memory of `to`, in the order of the current streams. Blocks where one side is the CPU.
c10::DataPtr copyBytes(const void* bytes, uint64_t count, c10::Device from, c10::Device to);

// Copies memory of the host, or of the device `to` itself, into new memory of that device. Does so in the order of the
// device's current stream, and does not wait for the copy. Host memory may be pinned or not. Keeps device memory, and
// memory of allocatePinned(), until the copy is done.
c10::DataPtr moveToDevice(c10::DataPtr bytes, uint64_t count, c10::Device to);

// Allocates pinned host memory, from torch's pool for this type of devices.
c10::DataPtr allocatePinned(c10::Device device, uint64_t bytes);

// Copies a device's bytes into pinned host memory, in the order of the device's current stream, without waiting for
// the copy. The memory comes from torch's pool for pinned memory, and returns there with the tensor.
at::Tensor stageBytes(const void* bytes, uint64_t count, c10::Device from);

} // namespace torch_ucx_rpc
