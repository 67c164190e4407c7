#include "memory/device_pool.h"

#include "memory/host_pool.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

namespace torch_ucx_rpc {

using c10::impl::VirtualGuardImpl;

namespace {

// The pool asks the streams once this much has been released. Asking takes some 200 us, in which an H100 copies about
// this much. Smaller amounts wait for the agent's timer.
constexpr uint64_t kMaxReleasedBytes = 256 * 1024 * 1024;
constexpr size_t kMaxReleasedBlocks = 16;

// Memory that came from entry points.
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

// The life of a block: in use -> released_ -> held_, as a part of a batch -> back at its allocator.
//
//   step        by            inUseBytes_  heldBytes_
//   in use      allocate()    counted
//   released_   release()                  counted
//   held_       examine()                  counted
//   given back  giveBack()
//   lost_       loseHeld(), or release() where no stream can be asked
//
// A thread takes blocks out of held_ before it gives them back. heldBytes_ counts each block until then.
struct DevicePool::Block {
  DevicePool* pool;
  c10::Device device;
  uint64_t bytes;
  c10::DataPtr data;
  DeviceWork use; // work that a stream unknown to torch had when the block was released
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
  isUnshareable_.store(false);
}

c10::DataPtr DevicePool::allocate(c10::Device device, uint64_t bytes) {
  if (bytes == 0) {
    return {nullptr, device};
  }
  const c10::Stream stream = streamOf(device);
  const c10::StreamGuard guard(stream);
  std::unique_lock lock(mutex_);
  // Copies the settings, to call the allocators without the lock: allocators may wait for Python, or for the device.
  const Source source = source_;
  const EntryPoints entryPoints = entryPoints_;
  const AllocatorOf allocatorOf = allocatorOf_;
  lock.unlock();

  const auto take = [&] {
    return source == Source::kEntryPoints ? allocateFrom(entryPoints, bytes, stream)
                                          : allocatorOf(device.type())->allocate(bytes);
  };
  if (source == Source::kTorch) { // this allocator waits for recorded streams itself
    return take();
  }
  // Memory whose uses have ended by now can serve this allocation. giveBack() looks at batches only. examine() would
  // also ask the streams, which takes too long for each allocation.
  if (const std::unique_lock collecting(collecting_, std::try_to_lock); collecting.owns_lock()) {
    giveBack();
  }
  auto block = std::make_unique<Block>(Block{this, device, bytes, {}, {}});
  try {
    block->data = take();
  } catch (const std::exception&) {
    waitForHeld(); // held memory may suffice once the streams are done with it
    block->data = take();
  }
  inUseBytes_.fetch_add(bytes);
  void* const data = block->data.get();
  return {data, block.release(), &DevicePool::release, device};
}

c10::DataPtr DevicePool::allocateBeside(c10::Device device, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const AllocatorOf allocatorOf = source_ == Source::kEntryPoints ? allocatorOf_ : nullptr;
  lock.unlock();
  if (allocatorOf == nullptr) {
    return {nullptr, device};
  }
  const c10::StreamGuard guard(streamOf(device));
  return allocatorOf(device.type())->allocate(bytes);
}

void DevicePool::waitForHeld() {
  // An earlier thread may have taken all held memory. When it releases this lock, that memory is back.
  const std::lock_guard waiting(waiting_);
  std::vector<Batch> held;
  {
    const std::lock_guard collecting(collecting_);
    examine();
    const std::lock_guard lock(mutex_);
    held = std::exchange(held_, {});
  }
  for (Batch& earlier : held) {
    wait(earlier);
  }
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
  std::unique_lock lock(mutex_);
  c10::Allocator* const ofTorch = source_ == Source::kTorch ? allocatorOf_(device.type()) : nullptr;
  lock.unlock(); // the allocator may wait for Python, or for the device
  if (ofTorch != nullptr) {
    return ofTorch->allocate(bytes);
  }
  c10::DataPtr data = allocate(device, bytes);
  earlierWork({device}).blockStreams(currentStreams({device}));
  return data;
}

void DevicePool::setPinned(AllocatePinned allocate) {
  const std::lock_guard lock(mutex_);
  allocatePinned_ = allocate;
}

c10::DataPtr DevicePool::allocateStaging(c10::Device device, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const AllocatePinned allocatePinned = allocatePinned_;
  lock.unlock();
  return allocatePinned != nullptr ? allocatePinned(device, bytes) : HostPool::instance().allocate(bytes);
}

void DevicePool::release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  DevicePool& pool = *block->pool;
  const uint64_t bytes = block->bytes;
  if (pool.isStopped_.load()) {
    pool.lose(std::move(block));
    pool.inUseBytes_.fetch_sub(bytes);
    return;
  }
  try {
    // A stream that torch has not made may be gone later, so release() asks it now. examine() asks all of torch's
    // streams.
    const Streams current = currentStreams({block->device});
    const Streams& known = pool.streamsOf(block->device);
    if (std::find(known.begin(), known.end(), current.front()) == known.end()) {
      block->use = DeviceWork(uncaptured(current));
    }
  } catch (const std::exception&) {
    pool.lose(std::move(block));
    pool.inUseBytes_.fetch_sub(bytes);
    return;
  }
  std::unique_lock lock(pool.mutex_);
  pool.heldBytes_.fetch_add(bytes);
  pool.inUseBytes_.fetch_sub(bytes); // after the other count, since isCollecting() is false if both are 0
  pool.releasedBytes_ += bytes;
  pool.released_.push_back(std::move(block));
  const bool isMuch = pool.releasedBytes_ >= kMaxReleasedBytes || pool.released_.size() >= kMaxReleasedBlocks;
  lock.unlock();
  if (isMuch) {
    pool.collect();
  }
}

// The pool can no longer ask whether a stream uses this memory. A leak is better than giving the memory to another
// tensor.
void DevicePool::lose(std::unique_ptr<Block> block) {
  const std::lock_guard lock(mutex_);
  lost_.push_back(std::move(block));
}

void DevicePool::loseHeld(Blocks blocks) {
  for (std::unique_ptr<Block>& block : blocks) {
    heldBytes_.fetch_sub(block->bytes);
    lose(std::move(block));
  }
}

void DevicePool::collect() {
  // Does not wait for another collecting thread, which may be waiting for a lock of this thread, such as the GIL.
  if (const std::unique_lock collecting(collecting_, std::try_to_lock); collecting.owns_lock()) {
    examine();
    giveBack();
  }
}

void DevicePool::stop() {
  isStopped_.store(true);
}

void DevicePool::examine() {
  std::unordered_map<c10::Device, Batch> batches;
  {
    const std::lock_guard lock(mutex_);
    releasedBytes_ = 0;
    for (std::unique_ptr<Block>& block : std::exchange(released_, {})) {
      batches[block->device].blocks.push_back(std::move(block));
    }
  }
  for (auto& [device, batch] : batches) {
    try {
      batch.uses = DeviceWork(uncaptured(streamsOf(device)));
    } catch (const std::exception&) {
      loseHeld(std::move(batch.blocks));
      continue;
    }
    const std::lock_guard lock(mutex_);
    held_.push_back(std::move(batch));
  }
}

void DevicePool::giveBack() {
  if (isStopped_.load()) {
    return;
  }
  Blocks over;
  Blocks failed;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(held_, [&](Batch& batch) {
      try {
        bool isOver = batch.uses.isDone(); // on torch's streams; below, on streams that torch has not made
        for (const std::unique_ptr<Block>& block : batch.blocks) {
          isOver = block->use.isDone() && isOver;
        }
        if (isOver) {
          std::move(batch.blocks.begin(), batch.blocks.end(), std::back_inserter(over));
        }
        return isOver;
      } catch (const std::exception&) {
        std::move(batch.blocks.begin(), batch.blocks.end(), std::back_inserter(failed));
        return true;
      }
    });
  }
  loseHeld(std::move(failed));
  giveBack(std::move(over));
}

void DevicePool::wait(Batch& batch) {
  try {
    batch.uses.wait();
    for (const std::unique_ptr<Block>& block : batch.blocks) {
      block->use.wait();
    }
  } catch (const std::exception&) {
    loseHeld(std::move(batch.blocks));
    return;
  }
  giveBack(std::move(batch.blocks));
}

void DevicePool::giveBack(Blocks blocks) {
  for (std::unique_ptr<Block>& block : blocks) {
    heldBytes_.fetch_sub(block->bytes);
    block.reset(); // without the lock: the allocator may be slow
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
  // Callers use the reference without the lock: entries do not change, and the map does not move them.
  const auto entry = allStreams_.find(device);
  return entry != allStreams_.end() ? entry->second : allStreams_.emplace(device, allStreams(device)).first->second;
}

} // namespace torch_ucx_rpc
