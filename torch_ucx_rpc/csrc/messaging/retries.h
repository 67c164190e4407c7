#pragma once

#include "base/file_reserve.h"
#include "messaging/messenger_parts.h"
#include "messaging/shared_memory_repair.h"

namespace torch_ucx_rpc {

// Repeats work for which no event shows when it can succeed:
// - It sends messages that have stranded after an error of this process, such as a full file table. It also moves
//   connections to the network. It does both every 20 ms, with the files of a reserve.
// - It resumes connections whose endpoints have failed, and asks peers for frames that they have not sent again.
//
// All functions need the worker lock.
class Retries : private MessengerParts {
 public:
  Retries(const MessengerParts& parts, SharedMemoryRepair& repair);

  // Tries everything again soon.
  void schedule();

  // Gives the reserve back. Retries tries nothing again afterwards.
  void close() {
    files_.release();
  }

 private:
  // Timer task.
  Timer::TimePoint retry(Timer::TimePoint now);
  // One round of resumption. Returns true if there is more to do later.
  bool resume(Connection& connection);

  SharedMemoryRepair& repair_;
  Timer::Task& task_; // own synchronization
  FileReserve files_;
  Timer::TimePoint warnedAt_{}; // timer thread only
};

} // namespace torch_ucx_rpc
