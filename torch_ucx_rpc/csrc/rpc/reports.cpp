#include "rpc/reports.h"

#include "memory/device_pool.h"
#include "memory/host_pool.h"

#include <c10/util/StringUtil.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// The table of all counts but one. messages_sending, which needs the worker lock, is added by statistics(). A field of
// torch_ucx_rpc/_observe/statistics.py documents each name.
AgentStatistics Reports::counters() const {
  AgentStatistics statistics{};
  uint64_t requestsOpen = 0;
  for (const Peer* peer : directory_.all()) {
    requestsOpen += static_cast<uint64_t>(peer->requestsOpen.load());
    statistics.peers.push_back(
        {.peer = peer,
         .state = peer->state(),
         .lanes = {},
         .counts =
             {{"calls_sent", "agent.calls_sent", peer->callsSent.load()},
              {"calls_failed", "", peer->callsFailed.load()},
              {"calls_received", "agent.calls_received", peer->callsReceived.load()},
              {"bytes_sent", "agent.bytes_sent", peer->bytesSent.load()},
              {"bytes_received", "agent.bytes_received", peer->bytesReceived.load()},
              {"times_resumed", "agent.times_resumed", peer->timesResumed.load()},
              {"resend_bytes", "agent.resend_bytes", peer->resendBytes.load()}},
         .latencyCounts = peer->latencies.counts(),
         .latencySum = peer->latencies.sum()});
  }
  const Executor::Counts threads = executor_.counts();
  const HostPool::Statistics pool = HostPool::instance().statistics();
  const Channel::Counts values = channel_.counts();
  const DevicePool::Statistics devicePool = DevicePool::instance().statistics();
  const ReceiveWindow& window = messenger_.window();
  statistics.counts = {
      {"calls_open", "agent.client_active_calls", calls_.open()},
      {"calls_timed_out", "agent.calls_timed_out", calls_.timedOut()},
      {"requests_open", "agent.server_active_calls", requestsOpen}, // received and not answered
      {"", "agent.server_active_async_calls", static_cast<uint64_t>(requests_.openAsync())}, // handlers returned
      {"requests_expired", "agent.requests_expired", requests_.expired()},
      {"requests_running", "agent.running_requests", threads.runningRequests},
      {"", "agent.nesting_requests", threads.nestingRequests},
      {"requests_waiting", "agent.waiting_requests", threads.waitingRequests},
      {"frames_refused", "agent.frames_refused", messenger_.refusedFrames()},
      {"threads", "agent.num_threads", threads.threads},
      {"threads_idle", "agent.num_idle_threads", threads.idle},
      {"", "agent.num_worker_threads", options_.numWorkerThreads},
      {"", "agent.thread_pool_size", options_.numWorkerThreads}, // torch's name for it
      {"", "agent.max_worker_threads", options_.maxWorkerThreads},
      {"values_put", "channel.values_put", values.put},
      {"values_taken", "channel.values_taken", values.taken},
      {"values_untaken_bytes", "channel.values_untaken_bytes", values.untakenBytes},
      {"pool_in_use_bytes", "pool.in_use_bytes", pool.inUseBytes},
      {"pool_cached_bytes", "pool.cached_bytes", pool.cachedBytes},
      {"pool_hits", "pool.hits", pool.hits},
      {"pool_misses", "pool.misses", pool.misses},
      {"device_pool_in_use_bytes", "device_pool.in_use_bytes", devicePool.inUseBytes},
      {"device_pool_held_bytes", "device_pool.held_bytes", devicePool.heldBytes},
      {"device_staged_bytes", "device_pool.staged_bytes", messenger_.stagedBytes()},
      {"window_limit_bytes", "window.limit_bytes", window.limitBytes()},
      {"window_in_use_bytes", "window.in_use_bytes", window.inUseBytes()},
      {"window_waiting_messages", "window.waiting_messages", window.waitingMessages.load()},
  };
  return statistics;
}

AgentStatistics Reports::statistics() const {
  AgentStatistics statistics = counters();
  Count& sending = statistics.counts.emplace_back(Count{"messages_sending", "", 0});
  if (lifetime_.isClosed()) {
    return statistics;
  }
  std::vector<const Peer*> peers;
  for (const AgentStatistics::OfPeer& of : statistics.peers) {
    peers.push_back(of.peer);
  }
  Messenger::Traffic traffic = messenger_.traffic(peers);
  sending.value = traffic.underWay;
  for (size_t index = 0; index < peers.size(); ++index) {
    statistics.peers[index].lanes = std::move(traffic.lanes[index]);
  }
  return statistics;
}

Reports::Texts Reports::metricsOf(const AgentStatistics& now, bool isProfilingGil) const {
  std::unordered_map<std::string, uint64_t> sums;
  const auto add = [&](const std::vector<Count>& counts) {
    for (const Count& count : counts) {
      sums[count.metric] += count.value;
    }
  };
  add(now.counts);
  for (const AgentStatistics::OfPeer& of : now.peers) {
    add(of.counts);
  }
  sums.erase(""); // counts without a metric
  Texts metrics;
  for (const auto& [name, sum] : sums) {
    metrics[name] = std::to_string(sum);
  }
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
