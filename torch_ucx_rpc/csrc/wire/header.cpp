#include "wire/header.h"

#include <cstring>
#include <string>

namespace torch_ucx_rpc::wire {

namespace {

Error malformed(const std::string& what) {
  return {ErrorCode::kProtocol, "malformed frame: " + what};
}

} // namespace

Error readHeader(std::span<const std::byte> bytes, Header& header) {
  if (bytes.size() != sizeof(Header)) {
    return malformed(
        "its header has " + std::to_string(bytes.size()) + " bytes, not " + std::to_string(sizeof(Header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(Header));
  if (header.magic != kMagic) {
    return malformed("it does not start with the magic number of torch_ucx_rpc");
  }
  if (header.version != kVersion) {
    return {
        ErrorCode::kProtocol,
        "a peer speaks wire version " + std::to_string(header.version) + ", this worker " + std::to_string(kVersion) +
            "; install the same torch_ucx_rpc on every worker"};
  }
  if (header.kind < Kind::kRequest || header.kind > Kind::kPong) {
    return malformed("unknown kind " + std::to_string(static_cast<int>(header.kind)));
  }
  const bool isMessage = header.kind == Kind::kRequest || header.kind == Kind::kResponse;
  if (header.spanCount > (isMessage ? kMaxSpans : 0)) {
    return malformed("it announces " + std::to_string(header.spanCount) + " spans");
  }
  if (header.index != kBodyIndex && header.index >= header.spanCount) {
    return malformed("span " + std::to_string(header.index) + " of " + std::to_string(header.spanCount));
  }
  return {};
}

} // namespace torch_ucx_rpc::wire
