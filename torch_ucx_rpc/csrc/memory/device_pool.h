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

// Memory of devices for what arrives. It is written to outside of any stream, so what its earlier owners have had done
// with it must be over. Allocators give memory back to the stream that it was allocated on, and do not wait for that
// stream: hence one on which nothing else is done.
//
// Torch's own allocator also waits for the streams that are recorded on memory, before it gives it out again. Another
// one, RMM's or one that torch's has been replaced with, hears of no other stream than that of the allocation. What is
// released of such memory is therefore held back here, until all is done that torch's streams had to do by then. There
// are 129 of them for a device, and asking all takes some 100 us: whoever releases memory, usually the user's thread,
// does not. They are asked for many blocks together, when something is collected, or when much has been released.
//
// One for the process: tensors may outlive everything. Thread-safe.
class DevicePool {
 public:
  // Those that an allocator has for torch.cuda.memory.CUDAPluggableAllocator; the first throws where there is no memory
  // left.
  struct EntryPoints {
    void* (*allocate)(size_t bytes, int device, void* stream);
    void (*deallocate)(void* data, size_t bytes, int device, void* stream);
  };
  // Torch's for a type of devices.
  using AllocatorOf = c10::Allocator* (*)(const c10::DeviceType& type);
  // Whose memory is taken.
  enum class Source : uint8_t {
    kTorch, // torch's allocator's, which waits for recorded streams
    kReplacedTorch, // torch's, which has been replaced by one that does not
    kEntryPoints,
  };
  // Of sources other than kTorch, for which torch has statistics.
  struct Statistics {
    uint64_t inUseBytes = 0;
    uint64_t heldBytes = 0; // released, and held back
  };

  static DevicePool& instance();

  // For what is allocated from now on. `entryPoints` for Source::kEntryPoints, `allocatorOf` for the others.
  void setSource(
      Source source, EntryPoints entryPoints = {nullptr, nullptr}, AllocatorOf allocatorOf = &c10::GetAllocator);

  // May be written to when earlierWork() is done. Throws what the allocator throws when there is no memory left, not
  // before it has waited for what is held back. No bytes need no memory, as with torch's own.
  c10::DataPtr allocate(c10::Device device, uint64_t bytes);
  DeviceWork earlierWork(const Devices& devices);

  // May be written to in the order of the stream that is current.
  c10::DataPtr allocateInOrder(c10::Device device, uint64_t bytes);

  // Gives the allocator back what need not be held back any longer.
  void collect();

  // Nothing is given back from now on, and no device asked: the process ends, and the allocator may have gone before
  // the last tensors.
  void stop();

  // Whether there is something of the kind, or will be.
  bool isCollecting() const {
    return inUseBytes_.load(std::memory_order_relaxed) + heldBytes_.load(std::memory_order_relaxed) != 0;
  }
  Statistics statistics() const {
    return {inUseBytes_.load(), heldBytes_.load()};
  }

 private:
  struct Block;
  using Blocks = std::vector<std::unique_ptr<Block>>;
  // Of one device, whose streams were asked once for all of them.
  struct Batch {
    Blocks blocks;
    DeviceWork uses; // that were under way when they were released
  };

  static void release(void* block);
  void lose(std::unique_ptr<Block> block);
  // Blocks' uses are found out: they become a batch, or are given back where there are none.
  void examine();
  void giveBack();
  void giveBack(Blocks blocks);
  void wait(Batch& batch); // and gives it back
  c10::Stream streamOf(c10::Device device);
  const Streams& streamsOf(c10::Device device);

  std::atomic<uint64_t> inUseBytes_{0};
  std::atomic<uint64_t> heldBytes_{0};
  std::atomic<bool> isStopped_{false};

  std::mutex mutex_;
  // Guarded by mutex_:
  Source source_ = Source::kTorch;
  EntryPoints entryPoints_{};
  AllocatorOf allocatorOf_ = &c10::GetAllocator;
  std::unordered_map<c10::Device, c10::Stream> streams_; // that memory is allocated on
  std::unordered_map<c10::Device, Streams> allStreams_; // never changed once they are there
  Blocks released_; // not examined yet
  uint64_t releasedBytes_ = 0;
  std::vector<Batch> held_;
  Blocks lost_; // of devices that have failed: nobody will use their memory again, nor can it be given back
};

} // namespace torch_ucx_rpc
