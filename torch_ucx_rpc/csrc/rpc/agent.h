#pragma once

#include "memory/devices_in_use.h"
#include "rpc/agent_options.h"
#include "rpc/agent_parts.h"
#include "rpc/call_client.h"
#include "rpc/channel.h"
#include "rpc/device_maps.h"
#include "rpc/group.h"
#include "rpc/orphaned_state.h"
#include "rpc/peer_monitor.h"
#include "rpc/reports.h"
#include "rpc/request_server.h"
#include "tensors/tensor_codec.h"
#include "torch_glue/fork_guard.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::worker_id_t;

// Implements torch's RpcAgent. It has torch's virtual functions, and connects the objects that do the work.
// docs/development/architecture.md lists these objects.
//
// Life: constructed -> members added (by Python, which exchanges them through the Store) -> start() -> join() or not ->
// shutdown(). In a dynamic group, members come and go after start() too. Agent threads that are stuck in user code at
// shutdown keep the object alive until they return.
//
// Threads wait for futures, in channels, barriers and join(), and in send() for an RRef's value. Each of them calls
// `whileWaiting` now and then, and when a signal has come in. `whileWaiting` may throw to end the wait (Ctrl-C).
class UcxRpcAgent : public torch::distributed::rpc::RpcAgent, public std::enable_shared_from_this<UcxRpcAgent> {
 public:
  UcxRpcAgent(
      std::string name,
      worker_id_t rank,
      std::unique_ptr<Transport> transport,
      std::unique_ptr<RequestCallback> callback,
      ThreadHooks threadHooks,
      std::function<void()> whileWaiting,
      const AgentOptions& options);
  ~UcxRpcAgent() override;

  const std::string& address() const {
    return messenger_.address();
  }
  uint64_t session() const {
    return self_.session;
  }
  // Throws RpcFailure in a process that was forked from this agent's process. The functions of RpcAgent that need the
  // agent's threads or UCX call this. Callers of the objects below must call it themselves.
  void checkProcess() const {
    processGuard_.check();
  }

  CallClient& calls() {
    return calls_;
  }
  Channel& channel() {
    return channel_;
  }
  DeviceMaps& deviceMaps() {
    return deviceMaps_;
  }
  Group& group() {
    return group_;
  }
  const OrphanedState& orphans() const {
    return orphans_;
  }
  const Reports& reports() const {
    return reports_;
  }

  // RpcAgent.
  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      c10::intrusive_ptr<Message> message,
      float rpcTimeoutSeconds,
      const DeviceMap& deviceMap) override;
  const WorkerInfo& getWorkerInfo(const std::string& name) const override {
    return group_.info(name);
  }
  const WorkerInfo& getWorkerInfo(worker_id_t rank) const override {
    return group_.info(rank);
  }
  using RpcAgent::getWorkerInfo;
  std::vector<WorkerInfo> getWorkerInfos() const override {
    return group_.infos();
  }
  void join(bool shutdown, float timeoutSeconds) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;
  std::unordered_map<std::string, std::string> getMetrics() override;
  std::unordered_map<std::string, std::string> getDebugInfo() override;
  DeviceMap getDeviceMap(const WorkerInfo& to) const override {
    return deviceMaps_.forRequestsTo(to.name_);
  }
  const std::vector<c10::Device>& getDevices() const override {
    return deviceMaps_.devices();
  }

 private:
  void addGilWaitTime(std::chrono::microseconds waitTime) override {
    reports_.addGilWait(waitTime);
  }

  const AgentOptions options_;
  const Identity self_;
  const ProcessGuard processGuard_;
  std::once_flag shutdownOnce_;

  // Each object has its own synchronization, and may use the objects above it. Events reach the objects below the
  // messenger through the interfaces of messaging/event_handlers.h.
  Lifetime lifetime_;
  Timer timer_;
  Directory directory_;
  DeviceMaps deviceMaps_;
  const std::shared_ptr<Executor> executor_;
  EventHandlers handlers_; // constant after construction
  Messenger messenger_;
  const AgentParts parts_{self_, directory_, messenger_, *executor_, timer_, lifetime_};
  CallClient calls_;
  Channel channel_;
  OrphanedState orphans_;
  PeerMonitor monitor_;
  RequestServer requests_;
  Group group_;
  Reports reports_;
};

} // namespace torch_ucx_rpc
