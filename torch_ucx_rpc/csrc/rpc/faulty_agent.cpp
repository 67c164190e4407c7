#include "rpc/faulty_agent.h"

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

using rpc::MessageType;

const std::map<std::string, MessageType>& requestTypes() {
  static const std::map<std::string, MessageType> types{
      {"SCRIPT_CALL", MessageType::SCRIPT_CALL},
      {"PYTHON_CALL", MessageType::PYTHON_CALL},
      {"SCRIPT_REMOTE_CALL", MessageType::SCRIPT_REMOTE_CALL},
      {"PYTHON_REMOTE_CALL", MessageType::PYTHON_REMOTE_CALL},
      {"SCRIPT_RREF_FETCH_CALL", MessageType::SCRIPT_RREF_FETCH_CALL},
      {"PYTHON_RREF_FETCH_CALL", MessageType::PYTHON_RREF_FETCH_CALL},
      {"RREF_USER_DELETE", MessageType::RREF_USER_DELETE},
      {"RREF_FORK_REQUEST", MessageType::RREF_FORK_REQUEST},
      {"RREF_CHILD_ACCEPT", MessageType::RREF_CHILD_ACCEPT},
      {"FORWARD_AUTOGRAD_REQ", MessageType::FORWARD_AUTOGRAD_REQ},
      {"BACKWARD_AUTOGRAD_REQ", MessageType::BACKWARD_AUTOGRAD_REQ},
      {"CLEANUP_AUTOGRAD_CONTEXT_REQ", MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ},
      {"RUN_WITH_PROFILING_REQ", MessageType::RUN_WITH_PROFILING_REQ}};
  return types;
}

MessageType requestType(const std::string& name) {
  const auto entry = requestTypes().find(name);
  if (entry == requestTypes().end()) {
    throw std::invalid_argument("there are no requests of type '" + name + "'");
  }
  return entry->second;
}

std::vector<MessageType> requestTypes(const std::vector<std::string>& names) {
  std::vector<MessageType> types;
  for (const std::string& name : names) {
    types.push_back(requestType(name));
  }
  return types;
}

// Delays requests, on the thread that then handles them.
class DelayingCallback final : public RequestCallback {
 public:
  DelayingCallback(std::unique_ptr<RequestCallback> handler, const Faults& faults) : handler_(std::move(handler)) {
    for (const auto& [name, delay] : faults.messagesToDelay) {
      delays_[requestType(name)] = delay;
    }
  }

  c10::intrusive_ptr<JitFuture> processMessage(Message& request, std::vector<c10::Stream> streams) const override {
    if (const auto delay = delays_.find(request.type()); delay != delays_.end()) {
      std::this_thread::sleep_for(delay->second);
    }
    return (*handler_)(request, std::move(streams));
  }

 private:
  const std::unique_ptr<RequestCallback> handler_;
  std::map<MessageType, std::chrono::milliseconds> delays_;
};

} // namespace

std::vector<std::string> requestTypeNames() {
  std::vector<std::string> names;
  for (const auto& [name, type] : requestTypes()) {
    names.push_back(name);
  }
  return names;
}

FaultyUcxRpcAgent::FaultyUcxRpcAgent(
    std::string name,
    worker_id_t rank,
    std::unique_ptr<Transport> transport,
    std::unique_ptr<RequestCallback> callback,
    ThreadHooks threadHooks,
    std::function<void()> whileWaiting,
    const AgentOptions& options,
    const Faults& faults)
    : UcxRpcAgent(
          std::move(name),
          rank,
          std::move(transport),
          std::make_unique<DelayingCallback>(std::move(callback), faults),
          std::move(threadHooks),
          std::move(whileWaiting),
          options),
      typesToFail_(requestTypes(faults.messagesToFail)),
      sendsToFail_(faults.sendsToFail) {}

c10::intrusive_ptr<JitFuture> FaultyUcxRpcAgent::send(
    const WorkerInfo& to, c10::intrusive_ptr<Message> message, float rpcTimeoutSeconds, const DeviceMap& deviceMap) {
  const MessageType type = message->type();
  if (std::find(typesToFail_.begin(), typesToFail_.end(), type) != typesToFail_.end()) {
    bool isToFail = false;
    {
      // A request that torch sends again has the same payload: its failures are counted together.
      const std::lock_guard lock(mutex_);
      int& failed = failedSends_[{type, message->payload()}];
      isToFail = failed < sendsToFail_;
      failed += isToFail ? 1 : 0;
    }
    if (isToFail) {
      auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
      future->setError(std::make_exception_ptr(std::runtime_error(rpc::makeRPCError(
          "this send to worker '" + to.name_ + "' fails on demand", rpc::RPCErrorType::INTENTIONAL_FAILURE))));
      return future;
    }
  }
  return UcxRpcAgent::send(to, std::move(message), rpcTimeoutSeconds, deviceMap);
}

} // namespace torch_ucx_rpc
