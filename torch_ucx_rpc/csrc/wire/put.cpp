#include "wire/put.h"

#include <cstring>

namespace torch_ucx_rpc::wire {

void appendPutName(Bytes& body, const PutName& name) {
  body.append(name.group.data(), name.group.size());
  body.append(name.tag.data(), name.tag.size());
  const PutTrailer trailer{
      name.epoch, static_cast<uint32_t>(name.group.size()), static_cast<uint32_t>(name.tag.size()), name.flags, 0};
  body.append(&trailer, sizeof(trailer));
}

Error readPutName(std::span<const std::byte> body, PutName& name, size_t& bodyBytes) {
  PutTrailer trailer{};
  if (body.size() < sizeof(trailer)) {
    return {ErrorCode::kProtocol, "malformed put: it has no trailer"};
  }
  const size_t names = body.size() - sizeof(trailer);
  std::memcpy(&trailer, body.data() + names, sizeof(trailer));
  if (uint64_t{trailer.groupBytes} + trailer.tagBytes > names) {
    return {ErrorCode::kProtocol, "malformed put: its names are longer than its body"};
  }
  bodyBytes = names - trailer.groupBytes - trailer.tagBytes;
  const char* const group = reinterpret_cast<const char*>(body.data()) + bodyBytes;
  name = {{group, trailer.groupBytes}, trailer.epoch, {group + trailer.groupBytes, trailer.tagBytes}, trailer.flags};
  return {};
}

} // namespace torch_ucx_rpc::wire
