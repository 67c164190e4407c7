#include "memory/device_pool.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <new>
#include <utility>

namespace torch_ucx_rpc {

using c10::impl::VirtualGuardImpl;

namespace {

// Memory that entry points have given.
struct Allocation {
  DevicePool::EntryPoints from;
  void* data;
  size_t bytes;
  c10::Stream stream;

  static void release(void* context) {
    const std::unique_ptr<Allocation> owned(static_cast<Allocation*>(context));
    owned->from.deallocate(owned->data, owned->bytes, owned->stream.device_index(), owned->stream.native_handle());
  }
};

c10::DataPtr allocateFrom(const DevicePool::EntryPoints& entryPoints, size_t bytes, const c10::Stream& stream) {
  auto allocation = std::make_unique<Allocation>(Allocation{entryPoints, nullptr, bytes, stream});
  allocation->data = entryPoints.allocate(bytes, stream.device_index(), stream.native_handle());
  if (allocation->data == nullptr) {
    throw std::bad_alloc();
  }
  void* const data = allocation->data;
  return {data, allocation.release(), &Allocation::release, stream.device()};
}

} // namespace

struct DevicePool::Block {
  DevicePool* pool;
  c10::Device device;
  uint64_t bytes;
  c10::DataPtr data;
  DeviceWork uses; // that were under way when it was released
};

DevicePool& DevicePool::instance() {
  static auto* pool = new DevicePool(); // NOLINT(cppcoreguidelines-owning-memory)
  return *pool;
}

void DevicePool::setSource(Source source, EntryPoints entryPoints, AllocatorOf allocatorOf) {
  const std::lock_guard lock(mutex_);
  source_ = source;
  entryPoints_ = entryPoints;
  allocatorOf_ = allocatorOf;
}

c10::DataPtr DevicePool::allocate(c10::Device device, uint64_t bytes) {
  if (bytes == 0) {
    return {nullptr, device};
  }
  const c10::Stream stream = streamOf(device);
  const c10::StreamGuard guard(stream);
  std::unique_lock lock(mutex_);
  const Source source = source_;
  const EntryPoints entryPoints = entryPoints_;
  const AllocatorOf allocatorOf = allocatorOf_;
  lock.unlock();

  const auto take = [&] {
    return source == Source::kEntryPoints ? allocateFrom(entryPoints, bytes, stream)
                                          : allocatorOf(device.type())->allocate(bytes);
  };
  if (source == Source::kTorch) {
    return take();
  }
  collect();
  auto block = std::make_unique<Block>(Block{this, device, bytes, {}, {}});
  try {
    block->data = take();
  } catch (const std::exception&) {
    lock.lock();
    Blocks held = std::exchange(held_, {});
    lock.unlock();
    if (held.empty()) {
      throw;
    }
    for (const std::unique_ptr<Block>& earlier : held) {
      earlier->uses.wait();
      heldBytes_.fetch_sub(earlier->bytes);
    }
    held.clear();
    block->data = take();
  }
  inUseBytes_.fetch_add(bytes);
  void* const data = block->data.get();
  return {data, block.release(), &DevicePool::release, device};
}

DeviceWork DevicePool::earlierWork(const Devices& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const c10::Device device : devices) {
    streams.push_back(streamOf(device));
  }
  return DeviceWork(streams);
}

c10::DataPtr DevicePool::allocateInOrder(c10::Device device, uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (source_ == Source::kTorch) {
      return allocatorOf_(device.type())->allocate(bytes);
    }
  }
  c10::DataPtr data = allocate(device, bytes);
  earlierWork({device}).blockStreams(currentStreams({device}));
  return data;
}

void DevicePool::release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  DevicePool& pool = *block->pool;
  pool.inUseBytes_.fetch_sub(block->bytes);
  try {
    block->uses = DeviceWork(busyStreams(block->device, pool.streamsOf(block->device)));
    if (!block->uses.isDone()) {
      pool.hold(std::move(block));
    }
  } catch (const std::exception&) {
    pool.lose(std::move(block));
  }
}

void DevicePool::hold(std::unique_ptr<Block> block) {
  heldBytes_.fetch_add(block->bytes);
  const std::lock_guard lock(mutex_);
  held_.push_back(std::move(block));
}

void DevicePool::lose(std::unique_ptr<Block> block) {
  const std::lock_guard lock(mutex_);
  lost_.push_back(std::move(block));
}

void DevicePool::collect() {
  Blocks over; // given back without the lock
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(held_, [&](std::unique_ptr<Block>& block) {
      bool isOver = false;
      try {
        isOver = block->uses.isDone();
      } catch (const std::exception&) {
        heldBytes_.fetch_sub(block->bytes);
        lost_.push_back(std::move(block));
        return true;
      }
      if (isOver) {
        heldBytes_.fetch_sub(block->bytes);
        over.push_back(std::move(block));
      }
      return isOver;
    });
  }
}

c10::Stream DevicePool::streamOf(c10::Device device) {
  const std::lock_guard lock(mutex_);
  const auto entry = streams_.find(device);
  return entry != streams_.end()
      ? entry->second
      : streams_.emplace(device, VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first->second;
}

const Streams& DevicePool::streamsOf(c10::Device device) {
  const std::lock_guard lock(mutex_);
  const auto entry = allStreams_.find(device);
  return entry != allStreams_.end() ? entry->second : allStreams_.emplace(device, allStreams(device)).first->second;
}

} // namespace torch_ucx_rpc
