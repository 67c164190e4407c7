#pragma once

#include "base/hmac.h"
#include "wire/header.h"

#include <cstdint>
#include <span>
#include <string>

// Seals the frames of a job with a secret.
//
// - Each ordered pair of workers has a key of its own, derived from the secret and both sessions
//   (torch_ucx_rpc/_bootstrap/secret.py). So frames recorded in an earlier life of either worker are not genuine in
//   this one.
// - Every frame has a frame tag. It covers the header with the frame's number, the length of the data, and a body that
//   travels in the frame. The receiver takes each number once.
// - A body or a payload that comes by rendezvous arrives later than its header. The content tag in the body's header
//   covers both, and the receiver checks the tag when they have arrived.
// - The tags cover the places and sizes of all tensors, and the bytes of tensors in the body. They do not cover the
//   bytes of tensors that travel as spans.

namespace torch_ucx_rpc::wire {

// Fills the content tag in the header of a message's body, for the parts that come by rendezvous. All fields before
// `sequence` but `endpoint` must have their final values. Call sealContent() before sealFrame(). It takes long for a
// large payload.
void sealContent(
    const std::string& key,
    Header& header,
    std::span<const std::byte> rendezvousBody,
    std::span<const std::byte> payload);
// True if the peer sealed this content. The arguments are those of sealContent().
bool isContentGenuine(
    const std::string& key,
    const Header& header,
    std::span<const std::byte> rendezvousBody,
    std::span<const std::byte> payload);

// Seals the frames to one peer, or checks those from it. One thread at a time.
class FrameSeal {
 public:
  explicit FrameSeal(const std::string& key) : hmac_(key) {}
  // Fills the frame tag. The header must have its number. After a change of the header, seal the frame again.
  // `dataBytes` is the size of the data that travels with the frame or that it announces. `data` is the body that
  // travels with it, or empty.
  void sealFrame(Header& header, uint64_t dataBytes, std::span<const std::byte> data);
  // True if the peer sealed this frame.
  bool isGenuine(const Header& header, uint64_t dataBytes, std::span<const std::byte> data);

 private:
  Hmac::Tag tagOf(const Header& header, uint64_t dataBytes, std::span<const std::byte> data);

  Hmac hmac_;
};

} // namespace torch_ucx_rpc::wire
