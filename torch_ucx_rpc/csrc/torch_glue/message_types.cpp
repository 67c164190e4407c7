#include "torch_glue/message_types.h"

#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_resp.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

bool runsPython(rpc::MessageType request) {
  switch (request) {
    case rpc::MessageType::PYTHON_CALL:
    case rpc::MessageType::PYTHON_REMOTE_CALL:
    case rpc::MessageType::PYTHON_RREF_FETCH_CALL:
    case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
    case rpc::MessageType::RUN_WITH_PROFILING_REQ:
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
  // Not RREF_FORK_REQUEST's, which sets requests going that wait for their RRefs.
  return request == rpc::MessageType::RREF_CHILD_ACCEPT || request == rpc::MessageType::RREF_USER_DELETE ||
      request == rpc::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ;
}

bool mustExecute(rpc::MessageType request) {
  return request == rpc::MessageType::PYTHON_REMOTE_CALL || request == rpc::MessageType::SCRIPT_REMOTE_CALL ||
      syntheticAck(request) != nullptr;
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
