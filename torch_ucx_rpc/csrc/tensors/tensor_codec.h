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

// Encodes torch's message for the transport.
//
// Tensors keep strides, dtype, requires_grad, lazy conjugation, sparse layouts and quantizers. Tensors whose memory
// overlaps still overlap after arrival. Only the part of a storage that tensors reach travels, and a view with large
// holes is copied without them. `deviceMap` says where tensors of devices arrive.
//
// Large tensors are lent to the transport until it has sent them (see LentMemory). Small ones, and memory that torch
// does not own (from_blob), are copied now. Tensors on devices have the contents that the current streams have given
// them by now. Device memory is copied to the host first in three cases: it is for the CPU, `transport` cannot take it,
// or `transport` cannot share it with that worker. `transport` is null for a message to oneself, which is copied
// anyway.
//
// Throws c10::Error for a tensor that cannot be sent (see whyUnsendable()). The text names the worker `to`, the number
// of the tensor in the message, its kind and the cure. Modes of the calling thread have no effect.
std::unique_ptr<OutgoingMessage> encodeMessage(
    c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport* transport);

struct DecodedMessage {
  c10::intrusive_ptr<Message> message;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> deviceStorages; // storages of its tensors on devices
};

// Decodes a message that has arrived into torch's message, and checks everything. Tensors may be on the CPU and on
// `devices`. Each storage that was sent becomes one storage with memory of its own, ready for use on the current
// streams. Modes of the calling thread have no effect.
Error decodeMessage(IncomingMessage incoming, const Devices& devices, DecodedMessage& decoded);

} // namespace torch_ucx_rpc
