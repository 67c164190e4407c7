#pragma once

#include "peers/peer.h"

#include <string>

namespace torch_ucx_rpc {

// This worker, as others know it.
struct Identity {
  Rank rank = 0;
  std::string name;
  uint64_t session = 0; // random; tells this life of the worker from others
};

} // namespace torch_ucx_rpc
