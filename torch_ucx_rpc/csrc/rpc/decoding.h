#pragma once

#include "messaging/messenger.h"
#include "rpc/device_maps.h"
#include "tensors/tensor_codec.h"

namespace torch_ucx_rpc {

// Decodes a request or an answer, after checking that its content is genuine. `streams` gets a stream from torch's
// pools for each device in use. The tensors may be used on these streams.
Error decodeArrived(
    Messenger& messenger,
    const DeviceMaps& deviceMaps,
    IncomingMessage arrived,
    Streams& streams,
    DecodedMessage& decoded);

} // namespace torch_ucx_rpc
