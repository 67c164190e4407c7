#pragma once

#include "transport/transport.h"

#include <memory>
#include <string>

namespace torch_ucx_rpc {

// Makes a transport on a UCX worker of its own. Throws std::runtime_error, with a sentence for the user, where UCX
// cannot start.
// - `expectedPeers` helps UCX choose resources. It is not a limit.
// - `networkDevices` are those that UCX may use where the user's UCX_NET_DEVICES says nothing, separated by commas;
//   empty: any.
std::unique_ptr<Transport> makeUcpTransport(size_t expectedPeers, const std::string& networkDevices = {});

} // namespace torch_ucx_rpc
