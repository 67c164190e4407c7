// libcuda.so.1 of the stub; see cuda_stub.h.

#include "cuda_numbers.h"
#include "cuda_stub.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

// As declared in cuda.h.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long; // NOLINT(google-runtime-int)
using CUcontext = struct Context*;
using CUstream = struct Stream*;
using CUevent = struct Event*;
using CUstreamCallback = void (*)(CUstream stream, CUresult status, void* argument);
using CUipcMemHandle = cuda_stub::IpcMemHandle;
using CUuuid = cuda_stub::Uuid;
using namespace cuda_stub; // NOLINT(google-build-using-namespace): all of it is CUDA's

constexpr size_t kPage = 2 << 20; // of the device
constexpr size_t kPages = 4096; // all that it has

using Clock = std::chrono::steady_clock;

std::atomic<bool> isUp{false}; // cuInit() has been called
std::atomic<bool> isDown{false}; // like CUDA after exit() has run its handlers

// ------------------------------------------------------------------------------------------------------- calls

class Calls {
 public:
  static Calls& instance() {
    static auto* calls = new Calls();
    return *calls;
  }
  std::atomic<uint64_t>& of(const char* function) {
    const std::lock_guard lock(mutex_);
    return counts_[function];
  }
  void write() {
    const char* const name = std::getenv("CUDA_STUB_CALLS");
    if (name == nullptr) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (std::FILE* file = std::fopen((std::string(name) + "." + std::to_string(getpid())).c_str(), "w")) {
      for (const auto& [function, count] : counts_) {
        std::fprintf(file, "%s %llu\n", function.c_str(), static_cast<unsigned long long>(count.load()));
      }
      std::fclose(file);
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::atomic<uint64_t>> counts_;
};

// Begin each function of the driver: the first one where cuInit() is not needed, the other one elsewhere.
//
// UCX writes a jump there: 5 bytes, or 12 if its own code is more than 2 GiB away. It must know the instructions that
// it replaces. A frame of more than 127 bytes takes a longer instruction, which makes them 14 bytes.
#define CALLED_EARLY()                                                    \
  do {                                                                    \
    [[maybe_unused]] std::array<char, 128> frame;                         \
    static std::atomic<uint64_t>& calls = Calls::instance().of(__func__); \
    calls.fetch_add(1);                                                   \
    if (isDown.load()) {                                                  \
      return kDeinitialized;                                              \
    }                                                                     \
  } while (false)
#define CALLED()              \
  do {                        \
    CALLED_EARLY();           \
    if (!isUp.load()) {       \
      return kNotInitialized; \
    }                         \
  } while (false)

uint64_t fromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::strtoull(value, nullptr, 10);
}

// ------------------------------------------------------------------------------------------------------ memory

enum class Kind : uint8_t {
  kLegacy, // cuMemAlloc's: has legacy IPC handles
  kPool, // cuMemAllocAsync's: has no handles
  kVirtual, // cuMemAddressReserve's, which has memory from the start, in chunks of a page: has file descriptors
};

struct Allocation {
  uintptr_t begin;
  size_t bytes;
  Kind kind;
  uint64_t id;
  bool isImported;
};

// The contents of an IPC handle.
struct Ticket {
  int64_t pid;
  int32_t file;
  uint32_t magic;
  uint64_t offset;
  uint64_t bytes;
};
constexpr uint32_t kMagic = 0x5743u;
static_assert(sizeof(Ticket) <= sizeof(CUipcMemHandle));

class Memory {
 public:
  static Memory& instance() {
    static auto* memory = new Memory();
    return *memory;
  }

  CUdeviceptr allocate(size_t bytes, Kind kind) {
    const std::lock_guard lock(mutex_);
    const size_t pages = (bytes + kPage - 1) / kPage;
    size_t first = 0;
    for (size_t page = 0; page < kPages; ++page) {
      if (isTaken_[page]) {
        first = page + 1;
      } else if (page + 1 - first == pages) {
        std::fill_n(isTaken_.begin() + static_cast<std::ptrdiff_t>(first), pages, true);
        const uintptr_t begin = arena_ + first * kPage;
        allocations_[begin] = {begin, bytes, kind, ++lastId_, false};
        return begin;
      }
    }
    return 0;
  }

  bool free(CUdeviceptr at) {
    const std::lock_guard lock(mutex_);
    const auto entry = allocations_.find(at);
    if (entry == allocations_.end()) {
      return false;
    }
    const Allocation allocation = entry->second;
    allocations_.erase(entry);
    if (allocation.isImported) {
      munmap(reinterpret_cast<void*>(allocation.begin), allocation.bytes);
      return true;
    }
    const size_t first = (allocation.begin - arena_) / kPage;
    const size_t pages = (allocation.bytes + kPage - 1) / kPage;
    std::fill_n(isTaken_.begin() + static_cast<std::ptrdiff_t>(first), pages, false);
    fallocate(
        file_,
        FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        static_cast<off_t>(first * kPage),
        static_cast<off_t>(pages * kPage));
    return true;
  }

  bool find(CUdeviceptr at, Allocation& found) {
    const std::lock_guard lock(mutex_);
    auto entry = allocations_.upper_bound(at);
    if (entry == allocations_.begin()) {
      return false;
    }
    found = (--entry)->second;
    return at < found.begin + found.bytes;
  }

  CUresult handleOf(CUdeviceptr at, CUipcMemHandle& handle) {
    Allocation allocation{};
    if (!find(at, allocation) || allocation.kind != Kind::kLegacy || allocation.isImported) {
      return kInvalidValue;
    }
    const Ticket ticket{getpid(), file_, kMagic, allocation.begin - arena_, allocation.bytes};
    std::memset(&handle, 0, sizeof(handle));
    std::memcpy(&handle, &ticket, sizeof(ticket));
    return kSuccess;
  }

  CUresult open(const CUipcMemHandle& handle, CUdeviceptr& at) {
    Ticket ticket{};
    std::memcpy(&ticket, &handle, sizeof(ticket));
    const char* const allowed = std::getenv("CUDA_STUB_IPC");
    if (ticket.magic != kMagic || ticket.pid == getpid() || (allowed != nullptr && *allowed == 'n')) {
      return kInvalidContext;
    }
    const std::string name = "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.file);
    const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) {
      return kInvalidContext;
    }
    void* const mapped =
        mmap(nullptr, ticket.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(ticket.offset));
    close(file);
    if (mapped == MAP_FAILED) {
      return kOutOfMemory;
    }
    const std::lock_guard lock(mutex_);
    at = reinterpret_cast<uintptr_t>(mapped);
    allocations_[at] = {static_cast<uintptr_t>(at), ticket.bytes, Kind::kLegacy, ++lastId_, true};
    return kSuccess;
  }

 private:
  Memory() {
    file_ = memfd_create("cuda_stub", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(kPages * kPage)) != 0) {
      std::abort();
    }
    // Aligned to what the device calls a page.
    void* const reserved =
        mmap(nullptr, (kPages + 1) * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena_ = (reinterpret_cast<uintptr_t>(reserved) + kPage - 1) / kPage * kPage;
    void* const mapped =
        mmap(reinterpret_cast<void*>(arena_), kPages * kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, 0);
    if (reserved == MAP_FAILED || mapped == MAP_FAILED) {
      std::abort();
    }
  }

  std::mutex mutex_;
  int file_ = -1;
  uintptr_t arena_ = 0;
  std::vector<bool> isTaken_ = std::vector<bool>(kPages);
  std::map<uintptr_t, Allocation> allocations_;
  uint64_t lastId_ = 0;
};

// ------------------------------------------------------------------------------------------------------ device

struct Context {};
struct Event {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};
};
struct Stream {
  struct Work {
    Clock::duration takes;
    std::function<void()> execute;
  };
  std::deque<Work> queue;
  Clock::time_point dueAt; // of the first piece of work
};

Context primaryContext;
std::atomic<int> primaryUsers{0};
thread_local std::vector<CUcontext> contexts;

CUcontext currentContext() {
  return contexts.empty() ? nullptr : contexts.back();
}

class Device {
 public:
  static Device& instance() {
    static auto* device = new Device();
    return *device;
  }

  void enqueue(CUstream stream, std::function<void()> work, uint64_t takesUs) {
    const std::lock_guard lock(mutex_);
    const std::chrono::microseconds takes(takesUs);
    if (stream->queue.empty()) {
      stream->dueAt = Clock::now() + takes;
    }
    stream->queue.push_back({takes, std::move(work)});
    changed_.notify_all();
  }

  void synchronize(CUstream stream) {
    const auto began = Clock::now();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream->queue.empty(); });
    blocked_ += Clock::now() - began;
  }

  Clock::duration blocked() {
    const std::lock_guard lock(mutex_);
    return blocked_;
  }

  CUstream makeStream() {
    auto* stream = new Stream();
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return stream;
  }

  void destroy(CUstream stream) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream->queue.empty(); });
    std::erase(streams_, stream);
    delete stream;
  }

  void hold(bool isHeld) {
    const std::lock_guard lock(mutex_);
    isHeld_ = isHeld;
    changed_.notify_all();
  }

  const uint64_t copyUs = fromEnvironment("CUDA_STUB_COPY_US");
  const uint64_t eventUs = fromEnvironment("CUDA_STUB_EVENT_US");

 private:
  Device() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto isWaiting = [this](CUstream stream) { return !isHeld_ && !stream->queue.empty(); };
      const auto next = std::min_element(streams_.begin(), streams_.end(), [&](CUstream a, CUstream b) {
        return isWaiting(a) != isWaiting(b) ? isWaiting(a) : a->dueAt < b->dueAt;
      });
      if (next == streams_.end() || !isWaiting(*next)) {
        changed_.wait(lock);
        continue;
      }
      CUstream stream = *next;
      if (stream->dueAt > Clock::now()) {
        changed_.wait_until(lock, stream->dueAt);
        continue;
      }
      const std::function<void()> execute = std::move(stream->queue.front().execute);
      lock.unlock();
      execute();
      lock.lock();
      stream->queue.pop_front();
      if (!stream->queue.empty()) {
        stream->dueAt = Clock::now() + stream->queue.front().takes;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<CUstream> streams_;
  bool isHeld_ = false;
  Clock::duration blocked_{0};
};

void* asPointer(CUdeviceptr at) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(at));
}

CUresult copyInOrder(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (currentContext() == nullptr) {
    return kInvalidContext;
  }
  Device& device = Device::instance();
  device.enqueue(stream, [=] { std::memcpy(asPointer(to), asPointer(from), bytes); }, device.copyUs);
  return kSuccess;
}

// False for an address outside of the device, with CUDA's error for it.
bool attribute(int which, const Allocation* allocation, void* value) {
  const auto set = [value](auto what) { std::memcpy(value, &what, sizeof(what)); };
  const bool isKnown = allocation != nullptr;
  const bool isLegacy = isKnown && allocation->kind == Kind::kLegacy;
  switch (which) {
    case kContext: // pools and mappings have none
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

// ---- What tests ask for.

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

// UCX asks for functions that older drivers lack: cuCtxSetFlags, and one for DMA-BUF, which the stub lacks too.
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

// ---- What the stub has not: managed memory, handles other than legacy IPC's, pools to share. UCX goes on without.

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
