#pragma once

#include <string>

// Says which UCX this is, also to sources that must not see UCX's headers.
namespace torch_ucx_rpc {

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
