#pragma once

#include "transport/ucp/ucp_transport.h"

#include <cstdlib>
#include <memory>
#include <string>

namespace torch_ucx_rpc {

// Makes a UCX transport over `lanes`, to which it sets UCX_TLS for the moment. If `lanes` is empty, UCX chooses.
inline std::unique_ptr<Transport> makeUcpTransportOver(const std::string& lanes) {
  if (lanes.empty()) {
    return makeUcpTransport(2);
  }
  const char* const before = std::getenv("UCX_TLS");
  const std::string restored = before != nullptr ? before : "";
  setenv("UCX_TLS", lanes.c_str(), 1);
  std::unique_ptr<Transport> made = makeUcpTransport(2);
  if (before != nullptr) {
    setenv("UCX_TLS", restored.c_str(), 1);
  } else {
    unsetenv("UCX_TLS");
  }
  return made;
}

} // namespace torch_ucx_rpc
