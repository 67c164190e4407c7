#pragma once

#include "peers/peer.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_ucx_rpc {

// One number of an agent's statistics, and where programs find it.
struct Count {
  const char* name; // in torch_ucx_rpc.statistics(), whose fields document it; empty: only a metric
  const char* metric; // in torch's get_metrics(); empty: not there
  uint64_t value;
};

// A snapshot of what an agent has done and is doing, for torch_ucx_rpc.statistics(), which documents it
// (torch_ucx_rpc/_observe/statistics.py). Counters go on while they are read.
struct AgentStatistics {
  struct OfPeer {
    const Peer* peer; // lives as long as the agent
    Peer::State state;
    std::vector<std::string> lanes; // empty before the first message
    std::vector<Count> counts; // a metric is the sum over all peers
    std::vector<uint64_t> latencyCounts; // LatencyHistogram::counts()
    std::chrono::nanoseconds latencySum;
  };

  std::vector<OfPeer> peers; // by rank, this worker included
  std::vector<Count> counts;
};

} // namespace torch_ucx_rpc
