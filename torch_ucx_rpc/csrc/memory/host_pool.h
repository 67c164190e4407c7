#pragma once

#include "base/intrusive_list.h"

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Memory for large host tensors that arrive. Touching fresh pages costs three to four times as much as the copy itself.
// So a block goes back to the pool when its tensor ends, and the next message finds it warm.
//
// - The pool is a real c10::Allocator. Tensors in its blocks can be resized, and may keep their memory without limit.
// - Blocks come in size classes, four to a power of two, so at most a fifth of a block is slack. From kHugePageBytes
//   on, blocks are whole huge pages, and the slack may also be almost one huge page. The pool aligns these blocks, and
//   advises the kernel to use huge pages.
// - The pool keeps idle blocks up to a limit. It unmaps the least recently returned block first.
// - Any thread may allocate and release. The process-wide instance is never destroyed, because tensors may outlive
//   everything.
class HostPool final : public c10::Allocator {
 public:
  // Smaller requests go to malloc, which keeps small blocks warm.
  static constexpr size_t kMinBlockBytes = 64 * 1024;
  static constexpr size_t kHugePageBytes = 2 * 1024 * 1024;

  struct Statistics {
    uint64_t inUseBytes = 0;
    uint64_t cachedBytes = 0;
    uint64_t hits = 0; // requests that found a warm block
    uint64_t misses = 0;
  };

  static HostPool& instance();

  explicit HostPool(size_t idleLimitBytes);
  ~HostPool() override; // returns idle blocks; blocks in use must be gone

  // Throws std::bad_alloc if the system has no memory left. The pointer's destructor frees the memory, on any thread.
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  // Sets the limit of idle bytes (256 MiB by default). The limit takes effect at once.
  void setIdleLimit(size_t bytes);
  Statistics statistics() const;

  // The size of the block that serves a request of `bytes`.
  static size_t blockBytes(size_t bytes);

 private:
  struct Block {
    HostPool* pool;
    void* data;
    size_t bytes;
    Block* before = nullptr; // in the list of idle blocks
    Block* after = nullptr;
  };

  static void release(void* block);
  void giveBack(Block* block);
  Block* takeIdleLocked(size_t bytes);
  void removeIdleLocked(Block* block);
  // Unlinks the oldest idle blocks until the limit holds; the caller unmaps them without the lock.
  std::vector<Block*> trimLocked();
  static void unmap(Block* block);

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  size_t idleLimitBytes_;
  IntrusiveList<Block> idle_; // in the order of their return
  Statistics statistics_;
};

} // namespace torch_ucx_rpc
