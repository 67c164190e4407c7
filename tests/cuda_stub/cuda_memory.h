#pragma once

#include "cuda_calls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

// The memory of the stub's device, which other processes can map.
namespace cuda_stub {

constexpr size_t kPage = 2 << 20; // a page of the device
constexpr size_t kPages = 4096; // the device's memory

enum class Kind : uint8_t {
  kLegacy, // cuMemAlloc's: has legacy IPC handles
  kPool, // cuMemAllocAsync's: has no handles
  kVirtual, // cuMemAddressReserve's: has memory from the start, in chunks of a page, and file descriptors
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
    // Aligned to a page of the device.
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

} // namespace cuda_stub
