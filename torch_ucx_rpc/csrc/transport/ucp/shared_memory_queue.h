#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch_ucx_rpc {

// The queue through which the processes of a machine send to a UCX worker over shared memory. It is a ring of slots in
// memory that belongs to the receiver. A sender takes a slot, writes its message, and marks the slot as written. The
// receiver reads slot after slot. UCX cannot recover from a sender that is killed before it marks its slot. The slot
// stays unmarked, and the receiver gets nothing more over shared memory, from any sender. So this class reads and
// repairs the ring, without UCX's knowledge.
//
// The layout is uct_mm's, the same from UCX 1.14 to 1.22 (src/uct/sm/mm/base/mm_iface.h). This class recognizes a ring
// by what UCX writes into a new one. It leaves alone a ring that looks different.
//
// Threads: end(), unwritten(), isConsistent() and skip() read and write the ring. They need the worker lock, and UCX
// must still have the ring. processes() touches no ring, and any thread may call it at any time.
class SharedMemoryQueue {
 public:
  // The start addresses of mappings of this process that may hold such queues. The queues of a new worker are in
  // mappings that were not there before.
  static std::set<uintptr_t> mapped();
  // The queues in memory that is mapped now and was not `before`. Only queues of workers that have received nothing
  // yet.
  static std::vector<SharedMemoryQueue> mappedSince(const std::set<uintptr_t>& before);

  // Counts the slots that were ever taken.
  using Position = uint64_t;
  // The position of the next message.
  Position end() const;
  // The first slot that was taken and is not marked as written. Its sender is writing it, or died writing it.
  std::optional<Position> unwritten() const;
  // True if the slots before the first unwritten one look as they do after use. False: this is not a ring of UCX's, and
  // must not be written to.
  bool isConsistent() const;
  // Marks a slot as written, with a message that UCX drops. The process that took the slot must not write any more.
  void skip(Position slot);

  // The processes that have this memory mapped, and so may write. Nothing if this process may not see all of them, or
  // has no file left to look with:
  // - System V memory: the kernel counts its users, and each must be found.
  // - POSIX memory: the kernel does not count. So this process must be in the machine's first pid namespace, which
  //   shows all processes. It must also be allowed to read the mappings of all processes of its user. UCX gives no
  //   other user access. Containers get nothing.
  std::optional<std::vector<pid_t>> processes() const;

 private:
  struct Control;
  struct Slot;
  struct Acknowledgement;
  struct Mapping;

  // Nothing if the mappings cannot be read; errno says why.
  static std::optional<std::vector<Mapping>> mappingsOf(const std::string& process);
  // Whether a living process may have this memory mapped although its mappings cannot be read. `why` is the errno of
  // that.
  static bool mayHideMappings(const std::string& process, int why);
  static std::optional<SharedMemoryQueue> recognize(const Mapping& mapping);

  Slot& slotAt(Position position) const;
  uint8_t markAt(Position position) const;

  std::string object_; // device and inode of the mapped memory
  std::optional<int> segment_; // id of the System V segment, if the memory is one
  Control* control_ = nullptr;
  std::byte* slots_ = nullptr;
  size_t count_ = 0; // a power of two
  size_t stride_ = 0; // bytes
};

} // namespace torch_ucx_rpc
