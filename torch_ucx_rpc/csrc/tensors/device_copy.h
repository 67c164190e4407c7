#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace torch_ucx_rpc {

// What torch makes tensors there with. c10::GetAllocator() still has torch's own where another has replaced it
// (torch.cuda.memory.change_current_allocator), and that one has never been set up.
c10::Allocator* allocatorOf(const c10::DeviceType& type);

// Copies bytes in the order of the streams that are current, into new memory of `to`. Blocks where one side is the CPU.
c10::DataPtr copyBytes(const void* bytes, uint64_t count, c10::Device from, c10::Device to);

// Copies bytes of a device into pinned memory of the host, in the order of the device's current stream, without waiting for that. The memory
// comes from torch's pool for it, and goes back there with the tensor.
at::Tensor stageBytes(const void* bytes, uint64_t count, c10::Device from);

} // namespace torch_ucx_rpc
