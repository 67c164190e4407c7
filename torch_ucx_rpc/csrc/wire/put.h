#pragma once

#include "base/bytes.h"
#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

// The body of a put: the body of a message (wire/body.h), the names that identify the value at the receiver, and a
// trailer with their lengths. The message's part comes first, so it is read like any other body.
//
//      +--------------------+-------+-----+----------------+
//      | body of a message  | group | tag | PutTrailer, 24 |
//      +--------------------+-------+-----+----------------+

namespace torch_ucx_rpc::wire {

enum PutFlags : uint32_t {
  kSingle = 1 << 0, // the value is a tensor, not a list of one
  // The message's body is too large to come along: it is the last span. An empty body is in its place, and names that
  // span as its payload.
  kBodyInSpan = 1 << 1,
};

struct PutTrailer {
  uint64_t epoch;
  uint32_t groupBytes;
  uint32_t tagBytes;
  uint32_t flags; // readers ignore unknown flags
  uint32_t reserved;
};
static_assert(sizeof(PutTrailer) == 24);

// The identity of a put. The names point into its body.
struct PutName {
  std::string_view group;
  uint64_t epoch = 0;
  std::string_view tag;
  uint32_t flags = 0;
};

void appendPutName(Bytes& body, const PutName& name);

// Reads the name, and the length of the message's body before it.
Error readPutName(std::span<const std::byte> body, PutName& name, size_t& bodyBytes);

} // namespace torch_ucx_rpc::wire
