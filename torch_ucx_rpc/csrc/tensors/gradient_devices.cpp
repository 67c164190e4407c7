#include "tensors/gradient_devices.h"

#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>

#include <utility>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::PropagateGradientsReq;
using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

void placeGradients(c10::intrusive_ptr<Message>& request) {
  if (request->type() != MessageType::BACKWARD_AUTOGRAD_REQ) {
    return;
  }
  // The forward pass has noted the tensors that this worker sent, with their devices.
  const std::unique_ptr<PropagateGradientsReq> received = PropagateGradientsReq::fromMessage(*request);
  const torch::distributed::autograd::AutogradMetadata metadata = received->getAutogradMetadata();
  const auto context = DistAutogradContainer::getInstance().retrieveContext(metadata.autogradContextId);
  const auto sent = context->retrieveSendFunction(metadata.autogradMessageId);
  std::vector<at::Tensor> gradients = received->getGrads();
  bool isAnyMoved = false;
  // The peer chooses how many gradients it sends, so there may be more of them than tensors.
  for (size_t index = 0; index < gradients.size() && index < sent->num_outputs(); ++index) {
    at::Tensor& gradient = gradients[index];
    const torch::autograd::Edge& edge = sent->next_edge(index);
    if (gradient.defined() && edge.is_valid()) {
      const c10::Device device = edge.function->input_metadata(edge.input_nr).device();
      isAnyMoved |= gradient.device() != device;
      gradient = gradient.to(device);
    }
  }
  if (isAnyMoved) {
    const int64_t id = request->id();
    request = PropagateGradientsReq(metadata, std::move(gradients), received->retainGraph()).toMessage();
    request->setId(id);
  }
}

} // namespace torch_ucx_rpc
