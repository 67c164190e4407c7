#pragma once

#include "messaging/message.h"
#include "wire/body.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <memory>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::DeviceMap;
using torch::distributed::rpc::Message;

// torch's message -> ours. Keeps strides, dtype, requires_grad, lazy conjugation, sparse layouts and quantizers;
// tensors whose memory overlaps still overlap after arrival. Of a storage only the bytes that the tensors reach travel; a
// view with large holes is packed. Memory that torch does not own (from_blob) is copied now, the rest is lent until UCX has sent it.
// Tensors on devices are those that the streams current now have made by then. `deviceMap` says where they arrive. Throws c10::Error,
// naming the worker `to`, for a tensor that cannot be sent. For a worker of this machine, what the transport cannot share of a device's
// memory is copied to the host's first.
std::unique_ptr<OutgoingMessage> encodeMessage(
    c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport& transport);

struct DecodedMessage {
  c10::intrusive_ptr<Message> message;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> deviceStorages; // those of its tensors that are not on the CPU
};

// Ours -> torch's. Checks everything; tensors may be on the CPU and on `devices`. Received tensors own their memory, one storage for
// each storage sent, and may be used on the streams that are current now.
Error decodeMessage(IncomingMessage incoming, const Devices& devices, DecodedMessage& decoded);

} // namespace torch_ucx_rpc
