#pragma once

// An agent for torch that does nothing, for objects that only ask which agent is torch's current one.

#include "torch_messages.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

class FakeRpcAgent final : public rpc::RpcAgent {
 public:
  explicit FakeRpcAgent(rpc::worker_id_t rank)
      : RpcAgent(
            rpc::WorkerInfo("w" + std::to_string(rank), rank),
            std::make_unique<Callback>(&echo),
            std::chrono::milliseconds(60'000)) {
    // torch asks for the resolver whenever it reads a message.
    setTypeResolver(
        std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName&) { return c10::StrongTypePtr({}, {}); }));
  }
  ~FakeRpcAgent() override {
    if (rpcAgentRunning_.load()) {
      shutdown(); // else ~RpcAgent would do it, when shutdownImpl() is gone
    }
  }

  Future send(
      const rpc::WorkerInfo& /*to*/,
      c10::intrusive_ptr<Message> message,
      const float /*rpcTimeoutSeconds*/,
      const rpc::DeviceMap& /*deviceMap*/) override {
    sent.push_back(message->type());
    return completed("");
  }
  const rpc::WorkerInfo& getWorkerInfo(const std::string& /*name*/) const override {
    return workerInfo_;
  }
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t /*rank*/) const override {
    return workerInfo_;
  }
  using RpcAgent::getWorkerInfo;
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override {
    return {workerInfo_};
  }
  void join(bool /*shutdown*/, float /*timeoutSeconds*/) override {}
  void sync() override {}
  void startImpl() override {}
  void shutdownImpl() override {}
  std::unordered_map<std::string, std::string> getMetrics() override {
    return {};
  }

  std::vector<MessageType> sent;

 private:
  void addGilWaitTime(const std::chrono::microseconds /*time*/) override {}
};

} // namespace torch_ucx_rpc
