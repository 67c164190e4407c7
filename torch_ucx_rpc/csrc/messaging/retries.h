#pragma once

#include "base/file_reserve.h"
#include "messaging/connection.h"
#include "messaging/event_buffer.h"
#include "messaging/outbox.h"
#include "messaging/shared_memory_repair.h"
#include "runtime/lifetime.h"
#include "runtime/progress.h"
#include "runtime/timer.h"

namespace torch_ucx_rpc {

// Tries work again for which no event tells when it can succeed:
// - Messages that have stranded over an error of this process, such as a full file table, are sent, and connections
//   move to the network. It tries every few milliseconds, with the files of a reserve.
// - Connections whose endpoints have failed are resumed, and peers are asked for what they have not sent again.
//
// All functions need the worker lock.
class Retries {
 public:
  // Adds a task to the timer, so it must not have started.
  Retries(
      Connections& connections,
      Outbox& outbox,
      SharedMemoryRepair& repair,
      EventBuffer& events,
      Progress& progress,
      Timer& timer,
      const Lifetime& lifetime);

  // Has everything tried again soon.
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

  Connections& connections_;
  Outbox& outbox_;
  SharedMemoryRepair& repair_;
  EventBuffer& events_;
  Progress& progress_; // own synchronization
  const Lifetime& lifetime_; // own synchronization
  Timer::Task& task_; // own synchronization
  FileReserve files_;
  Timer::TimePoint warnedAt_{}; // timer thread only
};

} // namespace torch_ucx_rpc
