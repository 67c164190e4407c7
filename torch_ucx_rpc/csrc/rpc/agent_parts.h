#pragma once

#include "messaging/messenger.h"
#include "peers/directory.h"
#include "peers/peer.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/timer.h"

#include <chrono>

namespace torch_ucx_rpc {

// The parts of an agent that most objects of rpc/ use, as their base class. The parts live as long as the agent.
// Constructors of these objects may add tasks to the timer, which starts later.
struct AgentParts {
  const Identity& self_;
  Directory& directory_;
  Messenger& messenger_;
  Executor& executor_;
  Timer& timer_;
  const Lifetime& lifetime_;
};

// How often a thread that blocks, and does not drive, looks for signals.
inline constexpr auto kSignalCheckPeriod = std::chrono::milliseconds(100);

} // namespace torch_ucx_rpc
