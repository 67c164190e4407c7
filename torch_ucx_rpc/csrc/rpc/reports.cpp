#include "rpc/reports.h"

#include "memory/device_pool.h"
#include "memory/host_pool.h"

#include <c10/util/StringUtil.h>

#include <utility>
#include <vector>

namespace torch_ucx_rpc {

AgentStatistics Reports::counters() const {
  AgentStatistics statistics{};
  for (const Peer* peer : directory_.all()) {
    AgentStatistics::OfPeer of{};
    of.peer = peer;
    of.state = peer->state();
    of.callsSent = peer->callsSent.load();
    of.callsFailed = peer->callsFailed.load();
    of.callsReceived = peer->callsReceived.load();
    of.bytesSent = peer->bytesSent.load();
    of.bytesReceived = peer->bytesReceived.load();
    of.latencyCounts = peer->latencies.counts();
    of.latencySum = peer->latencies.sum();
    statistics.requestsOpen += static_cast<uint64_t>(peer->requestsOpen.load());
    statistics.peers.push_back(std::move(of));
  }
  statistics.threads = executor_.counts();
  statistics.callsOpen = calls_.open();
  statistics.callsTimedOut = calls_.timedOut();
  statistics.asyncRequestsOpen = static_cast<uint64_t>(requests_.openAsync());
  statistics.requestsExpired = requests_.expired();
  statistics.framesRefused = messenger_.refusedFrames();
  statistics.pool = HostPool::instance().statistics();
  statistics.devicePool = DevicePool::instance().statistics();
  statistics.stagedBytes = messenger_.stagedBytes();
  const ReceiveWindow& window = messenger_.window();
  statistics.windowLimitBytes = window.limitBytes();
  statistics.windowInUseBytes = window.inUseBytes();
  statistics.windowWaitingMessages = window.waitingMessages.load();
  return statistics;
}

AgentStatistics Reports::statistics() const {
  AgentStatistics statistics = counters();
  if (lifetime_.isClosed()) {
    return statistics;
  }
  std::vector<const Peer*> peers;
  for (const AgentStatistics::OfPeer& of : statistics.peers) {
    peers.push_back(of.peer);
  }
  Messenger::Traffic traffic = messenger_.traffic(peers);
  statistics.messagesSending = traffic.underWay;
  for (size_t index = 0; index < peers.size(); ++index) {
    statistics.peers[index].lanes = std::move(traffic.lanes[index]);
  }
  return statistics;
}

Reports::Texts Reports::metricsOf(const AgentStatistics& now, bool isProfilingGil) const {
  uint64_t callsSent = 0;
  uint64_t callsReceived = 0;
  uint64_t bytesSent = 0;
  uint64_t bytesReceived = 0;
  for (const AgentStatistics::OfPeer& of : now.peers) {
    callsSent += of.callsSent;
    callsReceived += of.callsReceived;
    bytesSent += of.bytesSent;
    bytesReceived += of.bytesReceived;
  }
  Texts metrics{
      {"agent.num_worker_threads", std::to_string(options_.numWorkerThreads)},
      {"agent.thread_pool_size", std::to_string(options_.numWorkerThreads)}, // torch's name for it
      {"agent.num_threads", std::to_string(now.threads.threads)},
      {"agent.num_idle_threads", std::to_string(now.threads.idle)},
      {"agent.max_worker_threads", std::to_string(options_.maxWorkerThreads)},
      {"agent.running_requests", std::to_string(now.threads.runningRequests)},
      {"agent.nesting_requests", std::to_string(now.threads.nestingRequests)},
      {"agent.waiting_requests", std::to_string(now.threads.waitingRequests)},
      {"agent.client_active_calls", std::to_string(now.callsOpen)},
      {"agent.server_active_calls", std::to_string(now.requestsOpen)},
      {"agent.server_active_async_calls", std::to_string(now.asyncRequestsOpen)},
      {"agent.calls_sent", std::to_string(callsSent)},
      {"agent.calls_received", std::to_string(callsReceived)},
      {"agent.calls_timed_out", std::to_string(now.callsTimedOut)},
      {"agent.requests_expired", std::to_string(now.requestsExpired)},
      {"agent.bytes_sent", std::to_string(bytesSent)},
      {"agent.bytes_received", std::to_string(bytesReceived)},
      {"agent.frames_refused", std::to_string(now.framesRefused)},
      {"pool.in_use_bytes", std::to_string(now.pool.inUseBytes)},
      {"pool.cached_bytes", std::to_string(now.pool.cachedBytes)},
      {"pool.hits", std::to_string(now.pool.hits)},
      {"pool.misses", std::to_string(now.pool.misses)},
      {"device_pool.in_use_bytes", std::to_string(now.devicePool.inUseBytes)},
      {"device_pool.held_bytes", std::to_string(now.devicePool.heldBytes)},
      {"device_pool.staged_bytes", std::to_string(now.stagedBytes)},
      {"window.limit_bytes", std::to_string(now.windowLimitBytes)},
      {"window.in_use_bytes", std::to_string(now.windowInUseBytes)},
      {"window.waiting_messages", std::to_string(now.windowWaitingMessages)},
  };
  if (isProfilingGil) {
    const std::lock_guard lock(mutex_);
    const double average =
        gilWaits_ == 0 ? 0.0 : static_cast<double>(gilWaited_.count()) / static_cast<double>(gilWaits_);
    metrics["agent.gil_average_wait_time_us"] = std::to_string(average);
  }
  return metrics;
}

Reports::Texts Reports::debugInfo(bool isProfilingGil) const {
  const AgentStatistics now = statistics();
  Texts info = metricsOf(now, isProfilingGil);
  for (const auto& [key, value] : messenger_.transport().description()) {
    info[key] = value;
  }
  for (const AgentStatistics::OfPeer& of : now.peers) {
    if (!of.lanes.empty()) {
      info["lanes." + of.peer->member().name] = c10::Join(",", of.lanes);
    }
  }
  return info;
}

void Reports::addGilWait(std::chrono::microseconds time) {
  const std::lock_guard lock(mutex_);
  gilWaited_ += time;
  ++gilWaits_;
}

} // namespace torch_ucx_rpc
