#pragma once

#include "rpc/agent.h"

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// The faults to make. Requests are named by torch's types ("PYTHON_CALL", "RREF_FORK_REQUEST", ...).
struct Faults {
  // The first `sendsToFail` sends of each request of these types fail. torch repeats some requests.
  std::vector<std::string> messagesToFail;
  int sendsToFail = 0;
  // How long requests of a type wait at the callee before they are handled.
  std::map<std::string, std::chrono::milliseconds> messagesToDelay;
};

// The names of all request types.
std::vector<std::string> requestTypeNames();

// An agent that makes faults on demand. Tests use it to see how programs, and torch's protocols for RRefs and
// distributed autograd, react. Only torch_ucx_rpc/testing.py makes one.
class FaultyUcxRpcAgent final : public UcxRpcAgent {
 public:
  // Throws std::invalid_argument for an unknown type.
  FaultyUcxRpcAgent(
      std::string name,
      worker_id_t rank,
      std::unique_ptr<Transport> transport,
      std::unique_ptr<RequestCallback> callback,
      ThreadHooks threadHooks,
      std::function<void()> whileWaiting,
      const AgentOptions& options,
      const Faults& faults);

  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      c10::intrusive_ptr<Message> message,
      float rpcTimeoutSeconds,
      const DeviceMap& deviceMap) override;

 private:
  using MessageType = torch::distributed::rpc::MessageType;

  const std::vector<MessageType> typesToFail_;
  const int sendsToFail_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::map<std::pair<MessageType, std::vector<char>>, int> failedSends_; // the payload distinguishes messages
};

} // namespace torch_ucx_rpc
