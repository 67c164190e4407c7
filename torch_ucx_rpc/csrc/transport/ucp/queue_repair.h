#pragma once

#include "transport/transport.h"
#include "transport/ucp/shared_memory_queue.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// The reason why queues of this UCX are not repaired. Empty if they are. Repair writes into memory that belongs to UCX.
// So this function accepts only versions with which queue_repair_test.cpp has passed, and those between them.
std::string whyQueuesAreNotRepaired(const std::string& ucxVersion);

// Makes UCX skip the slots of processes that died while they were writing to the queues of its worker (see
// SharedMemoryQueue).
//
// An unmarked slot may also belong to a slow writer. QueueRepair skips the slot only when no thread can still be
// writing it. It first sees the slot unmarked. Then every thread of every process that maps the queue must show that it
// is not writing. A thread shows that if it is in a system call, has ended, or has run for longer than any copy of a
// message takes. "Asleep" alone proves nothing: a page fault (userfaultfd, FUSE), a frozen cgroup or a stop may hold a
// thread in the middle of writing.
//
// If some thread does not show this, QueueRepair skips nothing. The state becomes kUnrepairable after a bounded number
// of scans.
//
// Threads. state() needs the worker lock and takes microseconds. scan() reads /proc, which takes milliseconds. One
// thread at a time may call it, without the worker lock. Neither waits for the other.
class QueueRepair {
 public:
  // `whyNot` says why the queues are not repaired. Empty to repair them.
  QueueRepair(std::vector<SharedMemoryQueue> queues, std::string whyNot);

  // Skips the slots that the last scan has cleared, and asks for another scan if one is needed. kWhole means that all
  // slots taken before the first call since the previous kWhole have been written or skipped.
  RepairState state();

  // Does the scan that state() has asked for, if any.
  void scan();

  // "on", or "off: " and why. Constant, any thread.
  const std::string& description() const {
    return description_;
  }

 private:
  // The threads that may be writing a slot, and how long each had run when it was first seen.
  class Suspects {
   public:
    explicit Suspects(const std::vector<pid_t>& processes);
    // False once each has shown that it is not writing the slot.
    bool remain();

   private:
    std::map<std::pair<pid_t, pid_t>, uint64_t> cpuTicks_; // by process and thread
  };

  enum class Finding : uint8_t {
    kNone, // not looked yet, or a suspect remains
    kNobodyWrites,
    kUnsure, // looked long enough, and cannot tell
  };

  struct Repair {
    SharedMemoryQueue queue;

    // Guarded by the worker lock.
    std::optional<SharedMemoryQueue::Position> end; // of the slots to be repaired, while there are any
    std::optional<SharedMemoryQueue::Position> slot; // the first one that is not marked

    // Guarded by mutex_.
    std::optional<SharedMemoryQueue::Position> asked; // the slot whose writers a scan is to look for
    Finding finding = Finding::kNone; // about that slot

    // Used by the scanning thread alone.
    std::optional<SharedMemoryQueue::Position> scanned; // the slot of the members below
    std::optional<Suspects> suspects;
    unsigned blindScans = 0; // scans that could not see all processes
    unsigned suspectScans = 0; // scans that found suspects
  };

  RepairState state(Repair& repair);
  void ask(Repair& repair, std::optional<SharedMemoryQueue::Position> slot);
  static Finding look(Repair& repair, SharedMemoryQueue::Position slot);

  std::string description_;
  std::vector<Repair> repairs_;
  std::mutex mutex_; // held for moments only, never while /proc is read
};

} // namespace torch_ucx_rpc
