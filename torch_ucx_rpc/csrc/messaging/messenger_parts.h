#pragma once

#include "messaging/connection.h"
#include "messaging/event_buffer.h"
#include "messaging/outbox.h"
#include "peers/directory.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/progress.h"
#include "runtime/timer.h"
#include "transport/transport.h"

namespace torch_ucx_rpc {

// The parts of a messenger and of its agent that objects with timer tasks use. These objects derive from this struct.
// The parts live as long as the messenger. An object adds its tasks in its constructor, since the timer starts later.
struct MessengerParts {
  // Guarded by the worker lock:
  Transport& transport_;
  Connections& connections_;
  Outbox& outbox_;
  EventBuffer& events_;
  // Own synchronization:
  Progress& progress_;
  const Directory& directory_;
  Executor& executor_;
  Timer& timer_;
  const Lifetime& lifetime_;
};

} // namespace torch_ucx_rpc
