#pragma once

#include "peers/peer.h"
#include "rpc/agent_options.h"
#include "rpc/agent_parts.h"
#include "rpc/call_client.h"
#include "rpc/channel.h"
#include "rpc/request_server.h"

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
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

// Reports on the agent: statistics, and torch's metrics and debug info, which are made from them. reports.cpp has one
// table with the names and the sources of all counts. Thread-safe.
class Reports : private AgentParts {
 public:
  using Texts = std::unordered_map<std::string, std::string>;

  Reports(
      const AgentParts& parts,
      const AgentOptions& options,
      const CallClient& calls,
      const RequestServer& requests,
      const Channel& channel)
      : AgentParts(parts), options_(options), calls_(calls), requests_(requests), channel_(channel) {}

  // Waits for the worker lock, unless the agent is closed.
  AgentStatistics statistics() const;
  // Never waits for the worker lock. `isProfilingGil` adds the time that handlers have waited for the GIL.
  Texts metrics(bool isProfilingGil) const {
    return metricsOf(counters(), isProfilingGil);
  }
  // Metrics, the transport's own description, and the lanes to each peer.
  Texts debugInfo(bool isProfilingGil) const;

  void addGilWait(std::chrono::microseconds time);

 private:
  // The statistics that need no worker lock.
  AgentStatistics counters() const;
  Texts metricsOf(const AgentStatistics& now, bool isProfilingGil) const;

  const AgentOptions& options_;
  const CallClient& calls_;
  const RequestServer& requests_;
  const Channel& channel_;

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::chrono::microseconds gilWaited_{0};
  uint64_t gilWaits_ = 0;
};

} // namespace torch_ucx_rpc
