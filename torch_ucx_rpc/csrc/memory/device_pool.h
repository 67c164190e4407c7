#pragma once

#include "memory/device_streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

// Device memory for tensors that arrive. The transport writes to it outside of any stream, so all earlier uses must be
// over. Allocators order reuse by the stream on which memory was allocated, and do not wait for that stream. So the
// pool allocates on one stream for each device, which has little other work. It is one of torch's pool, which gives its
// streams out in turn: a handler or the user may get the same one.
//
// Torch's own allocator also waits for the streams that are recorded on memory, before it gives the memory out again.
// Other allocators (RMM's, or one that has replaced torch's) know only the stream of the allocation. The pool holds
// back their released memory until torch's streams have done the work that they had at the release. A device has 129
// such streams, and asking all of them takes some 200 us. The thread that releases memory, usually the user's, should
// not pay that each time. So the pool asks the streams once for many blocks: in collect(), or when much has been
// released.
//
// There is one pool for the process, because tensors may outlive everything. Thread-safe.
class DevicePool {
 public:
  // The entry points that an allocator has for torch.cuda.memory.CUDAPluggableAllocator. `allocate` throws or returns
  // null if no memory is left.
  struct EntryPoints {
    void* (*allocate)(size_t bytes, int device, void* stream);
    void (*deallocate)(void* data, size_t bytes, int device, void* stream);
  };
  // Returns torch's allocator for a type of devices.
  using AllocatorOf = c10::Allocator* (*)(const c10::DeviceType& type);
  // The allocator that memory is taken from.
  enum class Source : uint8_t {
    kTorch, // torch's own allocator, which waits for recorded streams
    kReplacedTorch, // the one that has replaced torch's, and does not wait for them
    kEntryPoints,
  };
  // Memory of sources other than kTorch; torch has its own statistics.
  struct Statistics {
    uint64_t inUseBytes = 0;
    uint64_t heldBytes = 0; // released and held back
  };

  // Allocates pinned host memory, from which a device copies without blocking the thread.
  using AllocatePinned = c10::DataPtr (*)(c10::Device device, uint64_t bytes);

  static DevicePool& instance();

  // Sets the source for later allocations. Source::kEntryPoints needs `entryPoints`. The others need `allocatorOf`, and
  // so does allocateBeside().
  void setSource(
      Source source, EntryPoints entryPoints = {nullptr, nullptr}, AllocatorOf allocatorOf = &c10::GetAllocator);

  // Allocates memory that may be written to once earlierWork() is done. If no memory is left, waits for the memory that
  // is held back, and tries again. Throws what the allocator throws then. Null for 0 bytes, as with torch's allocator.
  c10::DataPtr allocate(c10::Device device, uint64_t bytes);
  DeviceWork earlierWork(const Devices& devices);

  // Allocates memory from torch's own allocator, for bytes that are copied into the pool's memory later. The memory may
  // be written to once earlierWork() is done. Null unless the source is kEntryPoints.
  c10::DataPtr allocateBeside(c10::Device device, uint64_t bytes);
  // Whether a check has shown that other processes cannot map this source's memory.
  bool isUnshareable() const {
    return isUnshareable_.load(std::memory_order_relaxed);
  }
  void noteUnshareable() {
    isUnshareable_.store(true, std::memory_order_relaxed);
  }

  // Allocates memory that may be written to in the order of the current stream.
  c10::DataPtr allocateInOrder(c10::Device device, uint64_t bytes);

  // Host memory for bytes that arrive for a device and are copied there later. It is pinned if setPinned() was called.
  // Otherwise it comes from the host pool.
  void setPinned(AllocatePinned allocate);
  c10::DataPtr allocateStaging(c10::Device device, uint64_t bytes);

  // Gives memory whose uses are over back to the allocator, unless another thread is doing so. Does not wait.
  void collect();

  // From now on, gives nothing back and asks no device. Call it when the process ends: the allocator may be gone before
  // the last tensors are.
  void stop();

  // Whether memory is held back, or will be once it is released.
  bool isCollecting() const {
    return inUseBytes_.load(std::memory_order_relaxed) + heldBytes_.load(std::memory_order_relaxed) != 0;
  }
  Statistics statistics() const {
    return {inUseBytes_.load(), heldBytes_.load()};
  }

 private:
  struct Block;
  using Blocks = std::vector<std::unique_ptr<Block>>;
  // Blocks of one device that were released, and the work for which they are held back.
  struct Batch {
    Blocks blocks;
    DeviceWork uses; // work that the device's streams had when they were asked
  };

  static void release(void* block);
  void lose(std::unique_ptr<Block> block);
  void loseHeld(Blocks blocks);
  // Asks the streams of each device once for all its released blocks, which become a batch. Needs collecting_.
  void examine();
  void giveBack(); // needs collecting_
  void giveBack(Blocks blocks);
  // Waits for all memory that is held back, and gives it back.
  void waitForHeld();
  void wait(Batch& batch); // waits for the uses, and gives the blocks back
  c10::Stream streamOf(c10::Device device);
  const Streams& streamsOf(c10::Device device);

  std::atomic<uint64_t> inUseBytes_{0};
  std::atomic<uint64_t> heldBytes_{0};
  std::atomic<bool> isStopped_{false};
  std::atomic<bool> isUnshareable_{false};

  // A thread takes blocks out of the lists below before it gives them back. A thread that lacks memory must not miss
  // these blocks. So it waits for threads that wait for streams (waiting_), and for threads that collect (collecting_).
  // Lock in this order: waiting_, collecting_, mutex_.
  std::mutex waiting_;
  std::mutex collecting_;

  std::mutex mutex_;
  // Guarded by mutex_:
  Source source_ = Source::kTorch;
  EntryPoints entryPoints_{};
  AllocatePinned allocatePinned_ = nullptr;
  AllocatorOf allocatorOf_ = &c10::GetAllocator;
  std::unordered_map<c10::Device, c10::Stream> streams_; // the stream that memory is allocated on
  std::unordered_map<c10::Device, Streams> allStreams_; // constant once they are there
  Blocks released_; // blocks that are not in a batch yet
  uint64_t releasedBytes_ = 0;
  std::vector<Batch> held_;
  Blocks lost_; // blocks of failed devices, and those released after stop(); never given back
};

} // namespace torch_ucx_rpc
