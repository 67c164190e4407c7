#pragma once

#include "rpc/agent_parts.h"
#include "test_worker.h"

namespace torch_ucx_rpc {

inline AgentParts partsOf(TestWorker& worker) {
  return {worker.identity, worker.directory, worker.messenger, *worker.executor, worker.timer, worker.lifetime};
}

} // namespace torch_ucx_rpc
