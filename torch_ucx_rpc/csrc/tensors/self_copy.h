#pragma once

#include "messaging/message.h"

namespace torch_ucx_rpc {

// Copies the spans of a message that a worker sends to itself, as if they had travelled: `arrived` gets memory of its own, on the
// devices where the spans are to arrive, ordered after the streams that are current. An error where there is no memory, or a device
// fails.
Error copyForSelf(OutgoingMessage& message, IncomingMessage& arrived);

} // namespace torch_ucx_rpc
