#include "torch_glue/message_types.h"

#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_resp.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// The functions that make an RRef from its serialized form, as pickles name them: Python's
// (torch/distributed/rpc/internal.py) and TorchScript's (Pickler::pushRRef()). A call that only mentions these words is
// taken for one with an RRef.
constexpr std::string_view kRRefInPython = "_py_rref_receiver";
constexpr std::string_view kRRefInTorchScript = "torch.distributed.rpc\nrref\n";

bool hasRRef(const std::vector<char>& payload) {
  const std::string_view pickle(payload.data(), payload.size());
  return pickle.find(kRRefInPython) != std::string_view::npos ||
      pickle.find(kRRefInTorchScript) != std::string_view::npos;
}

// Reads the type of a message that autograd or the profiler has wrapped; UNKNOWN for a message that torch's
// rpc::writeWrappedPayload() has not written. That function appends a pickled tuple, and the pickle's length in eight
// bytes, the highest first. The wrapped type is the tuple's first element.
rpc::MessageType innermostType(const rpc::Message& request) {
  rpc::MessageType type = request.type();
  std::string_view rest(request.payload().data(), request.payload().size());
  while (type == rpc::MessageType::FORWARD_AUTOGRAD_REQ || type == rpc::MessageType::RUN_WITH_PROFILING_REQ) {
    uint64_t length = 0;
    if (rest.size() < sizeof(length)) {
      return rpc::MessageType::UNKNOWN;
    }
    for (const char byte : rest.substr(rest.size() - sizeof(length))) {
      length = length << 8 | static_cast<uint8_t>(byte);
    }
    rest.remove_suffix(sizeof(length));
    if (rest.size() < length) {
      return rpc::MessageType::UNKNOWN;
    }
    std::string_view pickle = rest.substr(rest.size() - length);
    rest.remove_suffix(length);
    // The protocol, a mark if the tuple has more than three elements, and an integer of two bytes.
    pickle.remove_prefix(std::min<size_t>(pickle.size(), 2));
    pickle.remove_prefix(pickle.starts_with('(') ? 1 : 0);
    if (pickle.size() < 3 || pickle[0] != 'M') {
      return rpc::MessageType::UNKNOWN;
    }
    type = static_cast<rpc::MessageType>(static_cast<uint8_t>(pickle[1]) | static_cast<uint8_t>(pickle[2]) << 8);
  }
  return type;
}

} // namespace

bool runsPython(rpc::MessageType request) {
  switch (request) {
    case rpc::MessageType::PYTHON_CALL:
    case rpc::MessageType::PYTHON_REMOTE_CALL:
    case rpc::MessageType::PYTHON_RREF_FETCH_CALL:
    case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
    case rpc::MessageType::RUN_WITH_PROFILING_REQ:
    case rpc::MessageType::EXCEPTION: // see failed_rref.h: calls that wait for the RRef are answered
      return true;
    default:
      return false;
  }
}

bool isFetch(rpc::MessageType request) {
  return request == rpc::MessageType::PYTHON_RREF_FETCH_CALL || request == rpc::MessageType::SCRIPT_RREF_FETCH_CALL;
}

bool mayRunOnDriver(rpc::MessageType request) {
  return request == rpc::MessageType::RREF_CHILD_ACCEPT;
}

bool mayCompleteOnDriver(rpc::MessageType request) {
  // Not RREF_FORK_REQUEST: its answer starts requests that wait for their RRefs.
  return request == rpc::MessageType::RREF_CHILD_ACCEPT || request == rpc::MessageType::RREF_USER_DELETE ||
      request == rpc::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ;
}

bool makesRRef(const rpc::Message& request) {
  const rpc::MessageType type = innermostType(request);
  return type == rpc::MessageType::PYTHON_REMOTE_CALL || type == rpc::MessageType::SCRIPT_REMOTE_CALL;
}

bool mustExecute(const rpc::Message& request) {
  return makesRRef(request) || syntheticAck(request.type()) != nullptr || hasRRef(request.payload());
}

c10::intrusive_ptr<rpc::Message> syntheticAck(rpc::MessageType request) {
  switch (request) {
    case rpc::MessageType::RREF_FORK_REQUEST:
    case rpc::MessageType::RREF_CHILD_ACCEPT:
    case rpc::MessageType::RREF_USER_DELETE:
      return rpc::RRefAck().toMessage();
    case rpc::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
      return torch::distributed::autograd::CleanupAutogradContextResp().toMessage();
    default:
      return nullptr;
  }
}

} // namespace torch_ucx_rpc
