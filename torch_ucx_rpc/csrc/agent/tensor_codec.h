#pragma once

#include "agent/mail.h"
#include "wire/body.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <memory>

namespace torch_ucx_rpc {

using torch::distributed::rpc::Message;

// torch's message -> ours. Keeps strides, dtype, requires_grad, lazy conjugation, sparse layouts and quantizers;
// tensors whose memory overlaps still overlap after arrival. Of a storage only the bytes that the tensors reach travel; a
// view with large holes is packed. Memory that torch does not own (from_blob) is copied now, the rest is lent until UCX has sent it.
// Throws c10::Error, naming the worker `to`, for a tensor that cannot be sent.
std::unique_ptr<OutgoingMessage> encodeMessage(c10::intrusive_ptr<Message> message, const Peer& to);

// Ours -> torch's. Checks everything. Received tensors own their memory, one storage for each storage sent.
Error decodeMessage(IncomingMessage incoming, c10::intrusive_ptr<Message>& message);

} // namespace torch_ucx_rpc
