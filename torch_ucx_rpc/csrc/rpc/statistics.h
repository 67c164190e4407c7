#pragma once

#include "memory/device_pool.h"
#include "memory/host_pool.h"
#include "peers/peer.h"
#include "runtime/executor.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_ucx_rpc {

// A snapshot of what an agent has done and is doing, for torch_ucx_rpc.statistics(), which documents it
// (torch_ucx_rpc/_observe/statistics.py). Counters go on while they are read.
struct AgentStatistics {
  struct OfPeer {
    const Peer* peer; // lives as long as the agent
    Peer::State state;
    std::vector<std::string> lanes; // empty before the first message
    uint64_t callsSent;
    uint64_t callsFailed;
    uint64_t callsReceived;
    uint64_t bytesSent;
    uint64_t bytesReceived;
    std::vector<uint64_t> latencyCounts; // LatencyHistogram::counts()
    std::chrono::nanoseconds latencySum;
  };

  std::vector<OfPeer> peers; // by rank, this worker included
  Executor::Counts threads;
  uint64_t callsOpen;
  uint64_t callsTimedOut;
  uint64_t requestsOpen; // received and not answered
  uint64_t asyncRequestsOpen; // of those, requests whose handler has returned
  uint64_t requestsExpired; // dropped before they ran, since their callers had given up
  uint64_t messagesSending;
  uint64_t framesRefused;
  HostPool::Statistics pool;
  DevicePool::Statistics devicePool;
  uint64_t stagedBytes; // bytes that went from a device through host memory, since UCX could not share them
  uint64_t windowLimitBytes;
  uint64_t windowInUseBytes;
  uint64_t windowWaitingMessages;
};

} // namespace torch_ucx_rpc
