// Compares cuda.h with the sources' declarations, and with the stub's numbers and structures. The test passes if this
// compiles.

#include "cuda_numbers.h"

#include "transport/ucp/cuda_driver.h"

#include <cuda.h>

#include <cstddef>
#include <type_traits>

// The parameters must have the same number and sizes. Our declarations do not use the types of cuda.h.
template <typename Theirs, typename Ours>
struct AreAlike : std::false_type {};
template <typename R, typename... Theirs, typename S, typename... Ours>
struct AreAlike<R (*)(Theirs...), S (*)(Ours...)>
    : std::bool_constant<
          sizeof...(Theirs) == sizeof...(Ours) && sizeof(R) == sizeof(S) && (... && (sizeof(Theirs) == sizeof(Ours)))> {
};

namespace cuda = torch_ucx_rpc::cuda;
static_assert(CUDA_SUCCESS == 0);
static_assert(cuda::kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(cuda::kIsLegacyIpcCapable == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
static_assert(std::is_same_v<cuda::DevicePointer, CUdeviceptr>);
static_assert(sizeof(CUpointer_attribute) == sizeof(int));
static_assert(AreAlike<decltype(&cuPointerGetAttributes), cuda::PointerGetAttributes>::value);
// cuda.h gives this name to the function _v2.
static_assert(AreAlike<decltype(&cuMemGetAddressRange), cuda::MemGetAddressRange>::value);

static_assert(cuda_stub::kSuccess == CUDA_SUCCESS);
static_assert(cuda_stub::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda_stub::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda_stub::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda_stub::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(cuda_stub::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(cuda_stub::kNotFound == CUDA_ERROR_NOT_FOUND);
static_assert(cuda_stub::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda_stub::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda_stub::kContext == CU_POINTER_ATTRIBUTE_CONTEXT);
static_assert(cuda_stub::kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(cuda_stub::kBufferId == CU_POINTER_ATTRIBUTE_BUFFER_ID);
static_assert(cuda_stub::kIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(cuda_stub::kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(cuda_stub::kIsLegacyIpcCapable == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
static_assert(cuda_stub::kAllowedHandleTypes == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
static_assert(cuda_stub::kMempoolHandle == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE);
static_assert(cuda_stub::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(cuda_stub::kPciBusId == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
static_assert(cuda_stub::kUnifiedAddressing == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
static_assert(cuda_stub::kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cuda_stub::kInvalidDevice == CU_DEVICE_INVALID);
static_assert(cuda_stub::kSymbolNotFound == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
static_assert(cuda_stub::kFileDescriptorHandles == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(cuda_stub::kPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cuda_stub::kOnDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(offsetof(cuda_stub::AllocationProperties, type) == offsetof(CUmemAllocationProp, type));
static_assert(
    offsetof(cuda_stub::AllocationProperties, handleTypes) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(cuda_stub::AllocationProperties, locationType) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(CUmemLocation, type) == 0 && offsetof(CUmemLocation, id) == sizeof(int));
static_assert(sizeof(cuda_stub::AllocationProperties) <= sizeof(CUmemAllocationProp));
static_assert(sizeof(cuda_stub::IpcMemHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(cuda_stub::Uuid) == sizeof(CUuuid));
