#pragma once

#include "messaging/message.h"

namespace torch_ucx_rpc {

// Copies the spans of a message that a worker sends to itself, as if they had travelled. `arrived` gets copies on the
// target devices, made in the order of the current streams. Returns an error if memory runs out or a device fails.
Error copyForSelf(OutgoingMessage& message, IncomingMessage& arrived);

} // namespace torch_ucx_rpc
