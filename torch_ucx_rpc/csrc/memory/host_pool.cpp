#include "memory/host_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace torch_ucx_rpc {

namespace {

constexpr size_t kDefaultIdleLimitBytes = 256 * 1024 * 1024;
constexpr size_t kPageBytes = 4096;

void freeMalloced(void* data) {
  std::free(data);
}

size_t roundUp(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// Maps `bytes` at an aligned address. It maps more, and gives the ends back.
void* mapAligned(size_t bytes, size_t alignment) {
  const size_t mapped = bytes + alignment;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    throw std::bad_alloc();
  }
  const auto address = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = roundUp(address, alignment);
  if (aligned != address) {
    munmap(start, aligned - address);
  }
  const size_t tail = address + mapped - (aligned + bytes);
  if (tail != 0) {
    munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  return reinterpret_cast<void*>(aligned);
}

} // namespace

HostPool& HostPool::instance() {
  static auto* const pool = [] {
    // A forked child may release tensors. So no other thread may have the lock when the process is forked.
    const auto unlock = [] { instance().mutex_.unlock(); };
    pthread_atfork([] { instance().mutex_.lock(); }, unlock, unlock);
    return new HostPool(kDefaultIdleLimitBytes);
  }();
  return *pool;
}

HostPool::HostPool(size_t idleLimitBytes) : idleLimitBytes_(idleLimitBytes) {}

HostPool::~HostPool() {
  setIdleLimit(0);
}

size_t HostPool::blockBytes(size_t bytes) {
  // Four classes to a power of two: 64, 80, 96, 112, 128, 160 KiB ...
  const size_t step = std::max(kPageBytes, std::bit_floor(bytes) / 4);
  const size_t block = roundUp(bytes, step);
  return block >= kHugePageBytes ? roundUp(block, kHugePageBytes) : block;
}

c10::DataPtr HostPool::allocate(size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes < kMinBlockBytes) {
    void* data = bytes == 0 ? nullptr : std::aligned_alloc(64, roundUp(bytes, 64));
    if (bytes != 0 && data == nullptr) {
      throw std::bad_alloc();
    }
    return {data, data, &freeMalloced, cpu};
  }
  const size_t size = blockBytes(bytes);
  if (size < bytes) {
    throw std::bad_alloc(); // rounding up has overflowed
  }
  Block* block = nullptr;
  {
    std::lock_guard lock(mutex_);
    block = takeIdleLocked(size);
    statistics_.inUseBytes += size;
    ++(block != nullptr ? statistics_.hits : statistics_.misses);
  }
  if (block == nullptr) {
    try {
      auto fresh = std::make_unique<Block>();
      fresh->pool = this;
      fresh->bytes = size;
      const bool huge = size >= kHugePageBytes;
      fresh->data = mapAligned(size, huge ? kHugePageBytes : kPageBytes);
      if (huge) {
        // Fails if the system has no huge pages; ordinary pages work too.
        (void)madvise(fresh->data, size, MADV_HUGEPAGE);
      }
      block = fresh.release();
    } catch (...) {
      std::lock_guard lock(mutex_);
      statistics_.inUseBytes -= size;
      throw;
    }
  }
  return {block->data, block, &HostPool::release, cpu};
}

void HostPool::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

void HostPool::release(void* block) {
  auto* released = static_cast<Block*>(block);
  released->pool->giveBack(released);
}

void HostPool::giveBack(Block* block) {
  std::vector<Block*> surplus;
  {
    std::lock_guard lock(mutex_);
    statistics_.inUseBytes -= block->bytes;
    statistics_.cachedBytes += block->bytes;
    idle_.push(block);
    surplus = trimLocked();
  }
  for (Block* unwanted : surplus) { // without the lock: unmapping is slow
    unmap(unwanted);
  }
}

HostPool::Block* HostPool::takeIdleLocked(size_t bytes) {
  // The most recently returned block of the class is the warmest. The list may be long, but traffic mostly repeats its
  // sizes. So the match is near the end, where the search begins.
  for (Block* block = idle_.last(); block != nullptr; block = block->before) {
    if (block->bytes == bytes) {
      removeIdleLocked(block);
      return block;
    }
  }
  return nullptr;
}

void HostPool::removeIdleLocked(Block* block) {
  statistics_.cachedBytes -= block->bytes;
  idle_.remove(block);
}

std::vector<HostPool::Block*> HostPool::trimLocked() {
  std::vector<Block*> surplus;
  while (statistics_.cachedBytes > idleLimitBytes_) {
    surplus.push_back(idle_.first());
    removeIdleLocked(idle_.first());
  }
  return surplus;
}

void HostPool::unmap(Block* block) {
  munmap(block->data, block->bytes);
  delete block;
}

void HostPool::setIdleLimit(size_t bytes) {
  std::vector<Block*> surplus;
  {
    std::lock_guard lock(mutex_);
    idleLimitBytes_ = bytes;
    surplus = trimLocked();
  }
  for (Block* unwanted : surplus) {
    unmap(unwanted);
  }
}

HostPool::Statistics HostPool::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

} // namespace torch_ucx_rpc
