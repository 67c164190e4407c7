#pragma once

#include "messaging/message.h"

namespace torch_ucx_rpc {

// Copies the spans of a message that a worker sends to itself, as if they had travelled. `arrived` gets memory of its
// own on the target devices, ordered after the current streams. Returns an error where memory runs out or a device
// fails.
Error copyForSelf(OutgoingMessage& message, IncomingMessage& arrived);

} // namespace torch_ucx_rpc
