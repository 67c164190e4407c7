#pragma once

#include <torch/csrc/distributed/rpc/message.h>

namespace torch_ucx_rpc {

// Moves the gradients of a distributed autograd request to the devices of the tensors that they belong to, in the order
// of the current streams. torch sends gradients by the inverse of the device map that brought the tensors. But a map
// that takes several devices to one, the CPU included, has no inverse. Throws if the request's autograd context is
// gone.
void placeGradients(c10::intrusive_ptr<torch::distributed::rpc::Message>& request);

} // namespace torch_ucx_rpc
