// A worker's metrics: their names, and their counts.

#include "rpc/reports.h"

#include "rpc_worker.h"
#include "value_of.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace torch_ucx_rpc {
namespace {

class ReportsTest : public testing::Test {
 protected:
  ReportsTest() {
    for (RpcWorker* worker : {&one_, &two_}) {
      worker->group.addMembers(membersOf(2));
      worker->parts.startDriving();
    }
  }
  ~ReportsTest() override {
    one_.close();
    two_.close();
  }
  uint64_t metric(const std::string& name) {
    return std::stoull(reports_.metrics(false).at(name));
  }

  LoopbackNetwork network_;
  RpcWorker one_{network_, 0};
  RpcWorker two_{network_, 1};
  AgentOptions options_;
  Channel channel_{partsOf(one_.parts), one_.deviceMaps, [] {}};
  Reports reports_{partsOf(one_.parts), options_, one_.calls, one_.requests, channel_};
};

TEST_F(ReportsTest, NamesOfMetricsArePartOfTheInterface) {
  std::set<std::string> names;
  for (const auto& [name, value] : reports_.metrics(true)) {
    names.insert(name);
  }
  EXPECT_EQ(
      names,
      (std::set<std::string>{
          "agent.bytes_received",
          "agent.bytes_sent",
          "agent.calls_received",
          "agent.calls_sent",
          "agent.calls_timed_out",
          "agent.client_active_calls",
          "agent.frames_refused",
          "agent.gil_average_wait_time_us",
          "agent.max_worker_threads",
          "agent.nesting_requests",
          "agent.num_idle_threads",
          "agent.num_threads",
          "agent.num_worker_threads",
          "agent.requests_expired",
          "agent.resend_bytes",
          "agent.running_requests",
          "agent.server_active_async_calls",
          "agent.server_active_calls",
          "agent.thread_pool_size",
          "agent.times_resumed",
          "agent.waiting_requests",
          "channel.values_put",
          "channel.values_taken",
          "channel.values_untaken_bytes",
          "device_pool.held_bytes",
          "device_pool.in_use_bytes",
          "device_pool.staged_bytes",
          "pool.cached_bytes",
          "pool.hits",
          "pool.in_use_bytes",
          "pool.misses",
          "window.in_use_bytes",
          "window.limit_bytes",
          "window.waiting_messages"}));
}

TEST_F(ReportsTest, CallsAreCountedWithTheirPeers) {
  EXPECT_EQ(textOf(*answer(one_.call(1, "out"))), "out");
  EXPECT_EQ(textOf(*answer(two_.call(0, "in"))), "in");
  ASSERT_TRUE(eventually([&] { return metric("agent.server_active_calls") == 0; }));
  EXPECT_EQ(metric("agent.calls_sent"), 1u);
  EXPECT_EQ(metric("agent.calls_received"), 1u);
  EXPECT_EQ(metric("agent.client_active_calls"), 0u);
  EXPECT_GT(metric("agent.bytes_sent"), 0u);
  EXPECT_GT(metric("agent.bytes_received"), 0u);
  const AgentStatistics statistics = reports_.statistics();
  ASSERT_EQ(statistics.peers.size(), 2u) << "this worker included";
  EXPECT_EQ(valueOf(statistics.peers[0].counts, "calls_sent"), 0u);
  EXPECT_TRUE(statistics.peers[0].lanes.empty());
  EXPECT_EQ(statistics.peers[1].peer, &one_.peer(1));
  EXPECT_EQ(statistics.peers[1].state, Peer::State::kPresent);
  EXPECT_EQ(valueOf(statistics.peers[1].counts, "calls_sent"), 1u);
  EXPECT_EQ(valueOf(statistics.peers[1].counts, "calls_received"), 1u);
  EXPECT_EQ(valueOf(statistics.peers[1].counts, "calls_failed"), 0u);
  EXPECT_EQ(statistics.peers[1].lanes, std::vector<std::string>{"loopback/memory"});
  EXPECT_GT(statistics.peers[1].latencySum.count(), 0);
}

TEST_F(ReportsTest, OpenCallsAndTimeoutsAreCounted) {
  network_.setFault([](const wire::Header&, SendMode) { return LoopbackNetwork::Fate::kDrop; });
  const Future future = one_.calls.send(one_.peer(1), makeMessage(MessageType::PYTHON_CALL, "x"), milliseconds(1), {});
  EXPECT_EQ(metric("agent.client_active_calls"), 1u);
  EXPECT_EQ(valueOf(reports_.statistics().counts, "calls_open"), 1u);
  one_.parts.advance(std::chrono::hours(1));
  EXPECT_EQ(rpcFailure(future)->kind(), RpcFailure::Kind::kTimedOut);
  EXPECT_EQ(metric("agent.calls_timed_out"), 1u);
  EXPECT_EQ(metric("agent.client_active_calls"), 0u);
  network_.setFault({});
}

TEST_F(ReportsTest, OptionsAreReported) {
  EXPECT_EQ(metric("agent.num_worker_threads"), options_.numWorkerThreads);
  EXPECT_EQ(metric("agent.thread_pool_size"), options_.numWorkerThreads);
  EXPECT_EQ(metric("agent.max_worker_threads"), options_.maxWorkerThreads);
  EXPECT_EQ(metric("window.limit_bytes"), one_.parts.messenger.window().limitBytes());
}

TEST_F(ReportsTest, AverageGilWaitIsReportedOnlyIfProfiled) {
  EXPECT_FALSE(reports_.metrics(false).contains("agent.gil_average_wait_time_us"));
  EXPECT_EQ(std::stod(reports_.metrics(true).at("agent.gil_average_wait_time_us")), 0.0);
  reports_.addGilWait(std::chrono::microseconds(10));
  reports_.addGilWait(std::chrono::microseconds(25));
  EXPECT_EQ(std::stod(reports_.metrics(true).at("agent.gil_average_wait_time_us")), 17.5);
}

TEST_F(ReportsTest, DebugInfoHasMetricsTransportAndLanes) {
  EXPECT_FALSE(reports_.debugInfo(false).contains("lanes.w1")) << "before the first message";
  (void)answer(one_.call(1, "x"));
  const Reports::Texts info = reports_.debugInfo(false);
  EXPECT_EQ(info.at("transport"), "loopback");
  EXPECT_EQ(info.at("lanes.w1"), "loopback/memory");
  for (const auto& [name, value] : reports_.metrics(false)) {
    EXPECT_TRUE(info.contains(name)) << name;
  }
}

TEST_F(ReportsTest, CountersCanBeReadAfterTheEnd) {
  (void)answer(one_.call(1, "x"));
  one_.close();
  const AgentStatistics statistics = reports_.statistics();
  EXPECT_EQ(valueOf(statistics.peers[1].counts, "calls_sent"), 1u);
  EXPECT_TRUE(statistics.peers[1].lanes.empty()) << "the transport is closed";
}

} // namespace
} // namespace torch_ucx_rpc
