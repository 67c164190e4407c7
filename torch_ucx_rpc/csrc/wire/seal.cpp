#include "wire/seal.h"

#include <cstddef>

namespace torch_ucx_rpc::wire {

namespace {

// A label comes first, so that a frame tag is never valid as a content tag.
constexpr uint64_t kFrameLabel = 0x454D415246585455; // "UTXFRAME"
constexpr uint64_t kContentLabel = 0x4E544E4F43585455; // "UTXCONTN"

template <typename T>
std::span<const std::byte> bytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Uses an HMAC context of its own: large data must not hold up the frames.
Hmac::Tag contentTag(
    const std::string& key,
    const Header& header,
    std::span<const std::byte> rendezvousBody,
    std::span<const std::byte> payload) {
  const uint64_t sizes[] = {rendezvousBody.size(), payload.size()};
  Header call = header;
  call.endpoint = 0; // it changes if the message is sent again
  return Hmac(key).of(
      {bytesOf(kContentLabel),
       bytesOf(call).first(offsetof(Header, sequence)), // names the call, and so the message
       std::as_bytes(std::span(sizes)),
       rendezvousBody,
       payload});
}

} // namespace

void sealContent(
    const std::string& key,
    Header& header,
    std::span<const std::byte> rendezvousBody,
    std::span<const std::byte> payload) {
  header.contentTag = contentTag(key, header, rendezvousBody, payload);
}

bool isContentGenuine(
    const std::string& key,
    const Header& header,
    std::span<const std::byte> rendezvousBody,
    std::span<const std::byte> payload) {
  return Hmac::areEqual(contentTag(key, header, rendezvousBody, payload), header.contentTag);
}

void FrameSeal::sealFrame(Header& header, uint64_t dataBytes, std::span<const std::byte> data) {
  header.frameTag = tagOf(header, dataBytes, data);
}

bool FrameSeal::isGenuine(const Header& header, uint64_t dataBytes, std::span<const std::byte> data) {
  return Hmac::areEqual(tagOf(header, dataBytes, data), header.frameTag);
}

Hmac::Tag FrameSeal::tagOf(const Header& header, uint64_t dataBytes, std::span<const std::byte> data) {
  return hmac_.of({bytesOf(kFrameLabel), bytesOf(header).first(offsetof(Header, frameTag)), bytesOf(dataBytes), data});
}

} // namespace torch_ucx_rpc::wire
