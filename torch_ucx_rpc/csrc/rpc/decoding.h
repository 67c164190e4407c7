#pragma once

#include "messaging/messenger.h"
#include "tensors/tensor_codec.h"

namespace torch_ucx_rpc {

// Decodes a message that has arrived, request or answer, once its content is known to be genuine. Its tensors may be
// used on `streams`: streams of torch's pool, one for each device in use.
Error decodeArrived(
    Messenger& messenger, const Devices& devices, IncomingMessage arrived, Streams& streams, DecodedMessage& decoded);

} // namespace torch_ucx_rpc
