#pragma once

#include "transport/ucp/shared_memory_queue.h"

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Gets the queues of a UCX worker past the slots of processes that died while they were writing (see SharedMemoryQueue). A slot that
// nobody has marked may also belong to somebody who is slow. It is skipped when nobody is left who could be writing it: since it was first
// seen, every thread of every process that has the queue mapped has been asleep in a system call, or has run for longer than
// the copying of any message takes, or is no more. Where not all of these processes can be seen, nothing is skipped.
class QueueRepair {
 public:
  explicit QueueRepair(std::vector<SharedMemoryQueue> queues);

  // To be called after a process has died, and again every few milliseconds until it returns true: what was begun before
  // the first call has been written or skipped.
  bool run();

 private:
  // The threads that may be writing a slot, and how long each had run when first seen.
  class Suspects {
   public:
    explicit Suspects(const std::vector<pid_t>& processes);
    // False when all have shown that they are not.
    bool remain();

   private:
    std::map<std::pair<pid_t, pid_t>, uint64_t> cpuTicks_; // by process and thread
  };

  struct Repair {
    SharedMemoryQueue queue;
    std::optional<SharedMemoryQueue::Position> end; // of what is to be repaired, while it is
    std::optional<SharedMemoryQueue::Position> slot; // that is not marked, and ...
    std::optional<Suspects> suspects; // ... who may be writing it; asked for once it is not marked at a second look
  };
  static bool run(Repair& repair);

  std::vector<Repair> repairs_;
};

} // namespace torch_ucx_rpc
