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
  // Headers of other versions may have other lengths, so the start is read first.
  struct {
    uint16_t magic;
    uint8_t version;
  } start{};
  if (bytes.size() >= sizeof(start)) {
    std::memcpy(&start, bytes.data(), sizeof(start));
  }
  if (start.magic != kMagic) {
    return malformed("it does not start with the magic number of torch_ucx_rpc");
  }
  if (start.version != kVersion) {
    return {
        ErrorCode::kProtocol,
        "a frame of wire version " + std::to_string(start.version) + ", while this worker speaks version " +
            std::to_string(kVersion) + ": install the same torch_ucx_rpc on every worker"};
  }
  if (bytes.size() != sizeof(Header)) {
    return malformed(
        "its header has " + std::to_string(bytes.size()) + " bytes, not " + std::to_string(sizeof(Header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(Header));
  if (header.kind < Kind::kRequest || header.kind > Kind::kPutRefused) {
    return malformed("unknown kind " + std::to_string(static_cast<int>(header.kind)));
  }
  if (header.spanCount > (isMessage(header.kind) ? kMaxSpans : 0)) {
    return malformed("it announces " + std::to_string(header.spanCount) + " spans");
  }
  if (header.index != kBodyIndex && header.index >= header.spanCount) {
    return malformed("span " + std::to_string(header.index) + " of " + std::to_string(header.spanCount));
  }
  if (const auto [offset, bytes] = header.place; header.index != kBodyIndex && offset != 0 && offset >= bytes) {
    return malformed("a piece at byte " + std::to_string(offset) + " of a span of " + std::to_string(bytes));
  }
  return {};
}

} // namespace torch_ucx_rpc::wire
