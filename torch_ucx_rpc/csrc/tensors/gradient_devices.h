#pragma once

#include <torch/csrc/distributed/rpc/message.h>

namespace torch_ucx_rpc {

// Moves the gradients that a request of distributed autograd brings to the devices of the tensors that they belong to, in the order of the
// streams that are current. torch sends them by the inverse of the device map that brought the tensors; a map that takes several devices
// to one, the CPU included, has none. Throws if the context of the request is gone.
void placeGradients(c10::intrusive_ptr<torch::distributed::rpc::Message>& request);

} // namespace torch_ucx_rpc
