#pragma once

#include "base/file_reserve.h"
#include "messaging/messenger_parts.h"
#include "messaging/shared_memory_repair.h"

namespace torch_ucx_rpc {

// Tries work again for which no event tells when it can succeed:
// - Messages that have stranded over an error of this process, such as a full file table, are sent, and connections
//   move to the network. It tries every few milliseconds, with the files of a reserve.
// - Connections whose endpoints have failed are resumed, and peers are asked for what they have not sent again.
//
// All functions need the worker lock.
class Retries : private MessengerParts {
 public:
  Retries(const MessengerParts& parts, SharedMemoryRepair& repair);

  // Tries everything again soon.
  void schedule();

  // Gives the reserve back. Nothing is tried again after it.
  void close() {
    files_.release();
  }

 private:
  // Timer task.
  Timer::TimePoint retry(Timer::TimePoint now);
  // One round of resumption. True if there is more to do later.
  bool resume(Connection& connection);

  SharedMemoryRepair& repair_;
  Timer::Task& task_; // own synchronization
  FileReserve files_;
  Timer::TimePoint warnedAt_{}; // timer thread only
};

} // namespace torch_ucx_rpc
