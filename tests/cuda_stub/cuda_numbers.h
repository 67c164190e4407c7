#pragma once

// The numbers of cuda.h that the stub uses. cuda_header_check.cpp compares them with cuda.h.

#include <cstdint>

namespace cuda_stub {

// CUresult
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNotInitialized = 3;
constexpr int kDeinitialized = 4;
constexpr int kInvalidContext = 201;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kNotSupported = 801;

// CUpointer_attribute
constexpr int kContext = 1;
constexpr int kMemoryType = 2;
constexpr int kBufferId = 7;
constexpr int kIsManaged = 8;
constexpr int kDeviceOrdinal = 9;
constexpr int kIsLegacyIpcCapable = 10;
constexpr int kAllowedHandleTypes = 14;
constexpr int kMempoolHandle = 17;
constexpr int kMemoryTypeDevice = 2; // CU_MEMORYTYPE_DEVICE

// CUdevice_attribute
constexpr int kPciBusId = 33;
constexpr int kUnifiedAddressing = 41;
constexpr int kComputeCapabilityMajor = 75;

constexpr int kInvalidDevice = -2; // CU_DEVICE_INVALID
constexpr int kSymbolNotFound = 1; // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
constexpr uint64_t kFileDescriptorHandles = 1; // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

// The beginning of CUmemAllocationProp.
struct AllocationProperties {
  int type;
  int handleTypes;
  int locationType;
  int locationId;
  void* rest[2];
};
constexpr int kPinned = 1; // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kOnDevice = 1; // CU_MEM_LOCATION_TYPE_DEVICE

struct IpcMemHandle {
  char reserved[64];
};
struct Uuid {
  char bytes[16];
};

} // namespace cuda_stub
