#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch_ucx_rpc {

// The queue through which the processes of a machine send to a UCX worker over shared memory: a ring of slots in memory that
// belongs to the receiver. A sender takes a slot, writes its message, and marks the slot as written; the receiver reads slot after
// slot. UCX has no answer to a sender that is killed in between. Its slot is never marked, and the receiver gets nothing more over
// shared memory, from anybody. So this looks into the ring behind UCX's back.
//
// The layout is uct_mm's, the same from UCX 1.14 to 1.22 (src/uct/sm/mm/base/mm_iface.h). A ring is recognized by what UCX writes into
// a new one; what looks different is left alone.
class SharedMemoryQueue {
 public:
  // Where the memory of such queues starts, in this process. A new worker's are those that were not there before it was made.
  static std::set<uintptr_t> mapped();
  // The queues among what is mapped now and was not `before`; of workers that nobody has sent to yet.
  static std::vector<SharedMemoryQueue> mappedSince(const std::set<uintptr_t>& before);

  // Counts the slots that were ever taken.
  using Position = uint64_t;
  // Where the next message will be.
  Position end() const;
  // The first slot that was taken and is not marked as written. Somebody is writing it, or died writing it.
  std::optional<Position> unwritten() const;
  // Marks a slot as written, with a message that UCX drops. Whoever took the slot must not write any more.
  void skip(Position slot);

  // The processes that have this memory mapped, and so may write. Nothing where there may be others that cannot be seen from here: in
  // a pid namespace of their own, as containers are that share no more than System V memory, or because no file is left to look.
  std::optional<std::vector<pid_t>> processes() const;

 private:
  struct Control;
  struct Slot;
  struct Acknowledgement;
  struct Mapping;

  static std::vector<Mapping> mappingsOf(const std::string& process);
  static std::optional<SharedMemoryQueue> recognize(const Mapping& mapping);

  Slot& slotAt(Position position) const;
  uint8_t markAt(Position position) const;

  std::string object_; // what is mapped: device and inode
  std::optional<int> segment_; // of System V, if it is one
  Control* control_ = nullptr;
  std::byte* slots_ = nullptr;
  size_t count_ = 0; // a power of two
  size_t stride_ = 0; // bytes
};

} // namespace torch_ucx_rpc
