#pragma once

#include "transport/transport.h"

#include <memory>
#include <string>

namespace torch_ucx_rpc {

// Makes a transport on a UCX worker of its own. Throws std::runtime_error, with a sentence for the user, if UCX cannot
// start.
// - `expectedPeers` helps UCX choose resources. It is not a limit.
// - `networkDevices` lists the devices that UCX may use if the user has not set UCX_NET_DEVICES, separated by commas.
//   Empty: any device.
std::unique_ptr<Transport> makeUcpTransport(size_t expectedPeers, const std::string& networkDevices = {});

// Version ("1.22.0") and file of the libucp that this process has loaded. The file is empty where the linker does not
// know it.
struct UcpLibrary {
  std::string version;
  std::string path;
};
UcpLibrary loadedUcpLibrary();

// Version of the headers that this was compiled against, "major.minor".
std::string ucpHeaderVersion();

} // namespace torch_ucx_rpc
