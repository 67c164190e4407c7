#pragma once

#include "messaging/messenger_parts.h"

#include <atomic>

namespace torch_ucx_rpc {

// Keeps the workers of this machine reachable when shared memory fails. A process that dies while it writes a message
// into this worker's shared memory leaves a gap there. Nothing behind the gap arrives (Transport::repairState()).
// SharedMemoryRepair closes the gap if that is possible. Otherwise this worker is deaf: it and its neighbours use the
// network from then on. Thread-safe, except functions that need the worker lock.
class SharedMemoryRepair : private MessengerParts {
 public:
  explicit SharedMemoryRepair(const MessengerParts& parts);

  // Asks for a check. Call it when a process of this machine has ended, and when this worker seems deaf.
  void request();

  // Moves a connection with isMoving to the network. False if this process lacks a file, for instance: the
  // connection stays as it is, and isMoving stays set.
  bool moveWithWorkerLock(Connection& connection);

 private:
  // Timer task.
  Timer::TimePoint repair(Timer::TimePoint now);
  void repairWithWorkerLock();

  Timer::Task& task_;

  std::atomic<bool> isWanted_{false}; // a check has been asked for, and none has followed yet
  std::atomic<bool> isRepairing_{false}; // the last check found a gap; written under the worker lock
  // Guarded by the worker lock:
  bool isDeaf_ = false; // Transport::repairState() is kUnrepairable
  bool hasWarned_ = false;
  // Timer thread only:
  Timer::TimePoint repairedAt_{};
};

} // namespace torch_ucx_rpc
