#pragma once

#include "base/bytes.h"
#include "transport/transport.h"
#include "wire/header.h"

#include <cstdint>

// What stranger_test tells the program `stranger` through a file: the address of a worker, its length in front, and then shots.

namespace torch_ucx_rpc {

struct Shot {
  wire::Header header;
  uint64_t dataBytes; // follow in the file
  uint32_t times;
  SendMode mode;
};

} // namespace torch_ucx_rpc
