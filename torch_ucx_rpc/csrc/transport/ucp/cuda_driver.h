#pragma once

#include <cstddef>

// A part of CUDA's driver API, as cuda.h has it: numbers and signatures that never change. Nothing here needs a CUDA
// toolkit. tests/cuda_stub/cuda_header_check.cpp compares it with cuda.h, where that is installed.
namespace torch_ucx_rpc::cuda {

using Result = int; // 0: success
using DevicePointer = unsigned long long; // NOLINT(google-runtime-int): as declared there

constexpr int kMemoryType = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: an unsigned int, 0 for memory that is not CUDA's
constexpr int kIsLegacyIpcCapable = 10; // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: an int

using PointerGetAttributes = Result (*)(unsigned count, int* attributes, void** values, DevicePointer address);
using MemGetAddressRange = Result (*)(DevicePointer* begin, size_t* bytes, DevicePointer address); // _v2

} // namespace torch_ucx_rpc::cuda
