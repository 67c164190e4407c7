#pragma once

#include "base/bytes.h"
#include "transport/transport.h"
#include "wire/header.h"

#include <cstdint>

// The file with the orders of stranger_test for the program `stranger`: the length and text of a worker's address, then
// shots.

namespace torch_ucx_rpc {

struct Shot {
  wire::Header header;
  uint64_t dataBytes; // these bytes follow in the file
  uint32_t times;
  SendMode mode;
};

} // namespace torch_ucx_rpc
