// libcuda.so.1 of the stub; see cuda_stub.h.

#include "cuda_device.h"
#include "cuda_memory.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

using namespace cuda_stub; // NOLINT(google-build-using-namespace): all of it is CUDA's

namespace {

CUresult copyInOrder(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (currentContext() == nullptr) {
    return kInvalidContext;
  }
  Device& device = Device::instance();
  device.enqueue(stream, [=] { std::memcpy(asPointer(to), asPointer(from), bytes); }, device.copyUs);
  return kSuccess;
}

// Returns false for a query that CUDA answers with an error, such as for an address outside the device.
bool attribute(int which, const Allocation* allocation, void* value) {
  const auto set = [value](auto what) { std::memcpy(value, &what, sizeof(what)); };
  const bool isKnown = allocation != nullptr;
  const bool isLegacy = isKnown && allocation->kind == Kind::kLegacy;
  switch (which) {
    case kContext: // pools and mappings have no context
      set(isLegacy ? &primaryContext : nullptr);
      break;
    case kMemoryType:
      set(isKnown ? kMemoryTypeDevice : 0);
      break;
    case kBufferId:
      set(isKnown ? allocation->id : uint64_t{0});
      break;
    case kIsManaged:
      set(uint32_t{0});
      break;
    case kDeviceOrdinal:
      set(isKnown ? 0 : kInvalidDevice);
      break;
    case kIsLegacyIpcCapable:
      set(isLegacy ? 1 : 0);
      break;
    case kAllowedHandleTypes:
      set(isKnown && allocation->kind == Kind::kVirtual ? kFileDescriptorHandles : uint64_t{0});
      break;
    case kMempoolHandle:
      set(static_cast<void*>(nullptr));
      break;
    default:
      return false;
  }
  return isKnown;
}

} // namespace

extern "C" {

// ---- The functions for tests.

void cudaStubHold(bool isHeld) {
  Device::instance().hold(isHeld);
}
uint64_t cudaStubCalls(const char* function) {
  return Calls::instance().of(function).load();
}
uint64_t cudaStubBlockedUs() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Device::instance().blocked()).count());
}

// ---- The driver.

CUresult cuInit(unsigned /*flags*/) {
  CALLED_EARLY();
  isUp.store(true);
  static const bool isRegistered = [] {
    return std::atexit([] {
             Calls::instance().write();
             isDown.store(true);
           }) == 0;
  }();
  return isRegistered ? kSuccess : kOutOfMemory;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  static const std::map<CUresult, const char*> texts{
      {kSuccess, "no error"},
      {kInvalidValue, "invalid argument"},
      {kOutOfMemory, "out of memory"},
      {kNotInitialized, "initialization error"},
      {kDeinitialized, "driver shutting down"},
      {kInvalidContext, "invalid device context"},
      {kNotFound, "named symbol not found"},
      {kNotReady, "device not ready"},
      {kNotSupported, "operation not supported"}};
  const auto entry = texts.find(error);
  *text = entry == texts.end() ? nullptr : entry->second;
  return entry == texts.end() ? kInvalidValue : kSuccess;
}

CUresult cuCtxSetFlags(unsigned /*flags*/) {
  CALLED();
  return currentContext() == nullptr ? kInvalidContext : kSuccess;
}

// UCX asks for functions that older drivers lack: cuCtxSetFlags, and one for DMA-BUF. The stub lacks the one for
// DMA-BUF too.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int /*version*/, uint64_t /*flags*/, int* status) {
  CALLED_EARLY();
  const bool isThere = std::strcmp(symbol, "cuCtxSetFlags") == 0;
  *function = isThere ? reinterpret_cast<void*>(&cuCtxSetFlags) : nullptr;
  if (status != nullptr) {
    *status = isThere ? 0 : kSymbolNotFound;
  }
  return isThere ? kSuccess : kNotFound;
}

CUresult cuDeviceGetCount(int* count) {
  CALLED();
  *count = 1;
  return kSuccess;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  CALLED();
  *device = ordinal;
  return ordinal == 0 ? kSuccess : kInvalidValue;
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice /*device*/) {
  CALLED();
  std::snprintf(name, static_cast<size_t>(bytes), "CUDA stub");
  return kSuccess;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice /*device*/) {
  CALLED();
  std::memset(uuid, 7, sizeof(*uuid));
  return kSuccess;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) { // of CUDA 13
  return cuDeviceGetUuid(uuid, device);
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice /*device*/) {
  CALLED();
  *bytes = kPages * kPage;
  return kSuccess;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice /*device*/) {
  CALLED();
  switch (attribute) {
    case kPciBusId:
      *value = 0x3b;
      break;
    case kUnifiedAddressing:
      *value = 1;
      break;
    case kComputeCapabilityMajor:
      *value = 9; // of Hopper
      break;
    default: // PCI domain and slot; no DMA-BUF, no fabric
      *value = 0;
  }
  return kSuccess;
}

// ---- Contexts: the primary one.

CUresult cuDevicePrimaryCtxGetState(CUdevice /*device*/, unsigned* flags, int* isActive) {
  CALLED();
  *flags = 0;
  *isActive = primaryUsers.load() > 0 ? 1 : 0;
  return kSuccess;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice /*device*/) {
  CALLED();
  primaryUsers.fetch_add(1);
  *context = &primaryContext;
  return kSuccess;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice /*device*/) {
  CALLED();
  primaryUsers.fetch_sub(1);
  return kSuccess;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  CALLED();
  *context = currentContext();
  return kSuccess;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  CALLED();
  contexts.push_back(context);
  return kSuccess;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  CALLED();
  if (contexts.empty()) {
    return kInvalidContext;
  }
  if (context != nullptr) {
    *context = contexts.back();
  }
  contexts.pop_back();
  return kSuccess;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  CALLED();
  *device = 0;
  return currentContext() == nullptr ? kInvalidContext : kSuccess;
}
CUresult cuCtxGetId(CUcontext context, unsigned long long* id) { // NOLINT(google-runtime-int)
  CALLED();
  *id = 1;
  return context == nullptr && currentContext() == nullptr ? kInvalidContext : kSuccess;
}

// ---- Memory.

CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
  CALLED();
  *at = Memory::instance().allocate(bytes, Kind::kLegacy);
  return *at == 0 ? kOutOfMemory : kSuccess;
}
CUresult cuMemAllocAsync(CUdeviceptr* at, size_t bytes, CUstream /*stream*/) {
  CALLED();
  *at = Memory::instance().allocate(bytes, Kind::kPool);
  return *at == 0 ? kOutOfMemory : kSuccess;
}
CUresult cuMemAddressReserve(
    CUdeviceptr* at, size_t bytes, size_t /*alignment*/, CUdeviceptr /*wanted*/, uint64_t /*flags*/) {
  CALLED();
  *at = Memory::instance().allocate(bytes, Kind::kVirtual);
  return *at == 0 ? kOutOfMemory : kSuccess;
}
CUresult cuMemMap(CUdeviceptr /*at*/, size_t /*bytes*/, size_t /*offset*/, uint64_t /*handle*/, uint64_t /*flags*/) {
  CALLED();
  return kSuccess;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t /*bytes*/) {
  CALLED();
  return Memory::instance().free(at) ? kSuccess : kInvalidValue;
}
CUresult cuMemFree_v2(CUdeviceptr at) {
  CALLED();
  return Memory::instance().free(at) ? kSuccess : kInvalidValue;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr at) {
  CALLED();
  Allocation allocation{};
  if (!Memory::instance().find(at, allocation)) {
    return kInvalidValue;
  }
  uintptr_t first = allocation.begin;
  size_t length = allocation.bytes;
  if (allocation.kind == Kind::kVirtual) { // the chunk that the address is in
    first += (at - first) / kPage * kPage;
    length = kPage;
  }
  if (begin != nullptr) {
    *begin = first;
  }
  if (bytes != nullptr) {
    *bytes = length;
  }
  return kSuccess;
}
CUresult cuPointerGetAttribute(void* value, int which, CUdeviceptr at) {
  CALLED();
  Allocation allocation{};
  const bool isKnown = Memory::instance().find(at, allocation);
  return attribute(which, isKnown ? &allocation : nullptr, value) ? kSuccess : kInvalidValue;
}
CUresult cuPointerGetAttributes(unsigned count, int* which, void** values, CUdeviceptr at) {
  CALLED();
  Allocation allocation{};
  const bool isKnown = Memory::instance().find(at, allocation);
  for (unsigned index = 0; index < count; ++index) {
    (void)attribute(which[index], isKnown ? &allocation : nullptr, values[index]);
  }
  return kSuccess; // also for memory that is not CUDA's
}
CUresult cuPointerSetAttribute(const void* /*value*/, int /*which*/, CUdeviceptr /*at*/) {
  CALLED();
  return kSuccess;
}
CUresult cuMemRetainAllocationHandle(uint64_t* handle, void* at) {
  CALLED();
  Allocation allocation{};
  if (!Memory::instance().find(reinterpret_cast<uintptr_t>(at), allocation) || allocation.kind != Kind::kVirtual) {
    return kInvalidValue;
  }
  *handle = allocation.id;
  return kSuccess;
}
CUresult cuMemGetAllocationPropertiesFromHandle(void* properties, uint64_t /*handle*/) {
  CALLED();
  const AllocationProperties pinnedOnDevice{kPinned, static_cast<int>(kFileDescriptorHandles), kOnDevice, 0, {}};
  std::memcpy(properties, &pinnedOnDevice, sizeof(pinnedOnDevice));
  return kSuccess;
}
CUresult cuMemRelease(uint64_t /*handle*/) {
  CALLED();
  return kSuccess;
}
CUresult cuMemHostRegister_v2(void* /*at*/, size_t /*bytes*/, unsigned /*flags*/) {
  CALLED();
  return kSuccess;
}
CUresult cuMemHostUnregister(void* /*at*/) {
  CALLED();
  return kSuccess;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  CALLED();
  return Memory::instance().handleOf(at, *handle);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* at, CUipcMemHandle handle, unsigned /*flags*/) {
  CALLED();
  return Memory::instance().open(handle, *at);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  CALLED();
  return Memory::instance().free(at) ? kSuccess : kInvalidValue;
}

// ---- Streams and events.

CUresult cuStreamCreate(CUstream* stream, unsigned /*flags*/) {
  CALLED();
  *stream = Device::instance().makeStream();
  return kSuccess;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  CALLED();
  Device::instance().destroy(stream);
  return kSuccess;
}
CUresult cuStreamSynchronize(CUstream stream) {
  CALLED();
  Device::instance().synchronize(stream);
  return kSuccess;
}
CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* argument, unsigned /*flags*/) {
  CALLED();
  Device::instance().enqueue(stream, [=] { callback(stream, kSuccess, argument); }, 0);
  return kSuccess;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CALLED();
  return copyInOrder(to, from, bytes, stream);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CALLED();
  Allocation allocation{};
  if (!Memory::instance().find(to, allocation) || !Memory::instance().find(from, allocation)) {
    return kInvalidValue;
  }
  return copyInOrder(to, from, bytes, stream);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  CALLED();
  std::memcpy(asPointer(to), from, bytes);
  return kSuccess;
}
CUresult cuEventCreate(CUevent* event, unsigned /*flags*/) {
  CALLED();
  *event = new Event();
  return kSuccess;
}
CUresult cuEventDestroy_v2(CUevent event) {
  CALLED();
  delete event;
  return kSuccess;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  CALLED();
  const uint64_t number = event->recorded.fetch_add(1) + 1;
  Device& device = Device::instance();
  device.enqueue(stream, [=] { event->done.store(number); }, device.eventUs);
  return kSuccess;
}
CUresult cuEventQuery(CUevent event) {
  CALLED();
  return event->done.load() == event->recorded.load() ? kSuccess : kNotReady;
}

// ---- The stub lacks managed memory, handles other than legacy IPC's, and pools to share. UCX works without them.

#define UNSUPPORTED(function) \
  CUresult function() {       \
    CALLED();                 \
    return kNotSupported;     \
  }
UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemRangeGetAttribute)
UNSUPPORTED(cuMemCreate)
UNSUPPORTED(cuMemUnmap)
UNSUPPORTED(cuMemSetAccess)
UNSUPPORTED(cuMemGetAllocationGranularity)
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
UNSUPPORTED(cuMemPoolDestroy)
UNSUPPORTED(cuMemPoolExportPointer)
UNSUPPORTED(cuMemPoolExportToShareableHandle)
UNSUPPORTED(cuMemPoolImportFromShareableHandle)
UNSUPPORTED(cuMemPoolImportPointer)
UNSUPPORTED(cuMemPoolSetAccess)

} // extern "C"
