#pragma once

#include "base/hmac.h"
#include "wire/header.h"
#include "wire/replay_window.h"

#include <cstdint>
#include <span>
#include <string>

// How the frames of a job with a secret are sealed. Each ordered pair of workers has a key of its own, made of the secret and
// of both sessions (torch_ucx_rpc/_bootstrap/secret.py): what was recorded of an earlier life of either means nothing to this one. Under
// it every frame has a number, which is taken once, and a tag over header, number and the length of its data; that of a
// body which travels in its frame is over the body too. What comes by rendezvous and must not be changed, a large body and a
// large payload, is covered by the content tag in the body's header, which can be checked when it is there. The bytes of
// tensors are not covered; where they go, and how many they are, is.

namespace torch_ucx_rpc::wire {

// Seals the frames to one peer. One thread at a time, unless it says otherwise.
class Sealer {
 public:
  explicit Sealer(std::string key) : key_(std::move(key)), hmac_(key_) {}

  // Any thread, before sealFrame(): for the header of a body with an address.
  void sealContent(Header& header, std::span<const std::byte> parkedBody, std::span<const std::byte> payload) const;

  // Numbers the frame, too. `dataBytes` travel with it or are announced by it; `data` is the body that travels with it, or nothing.
  void sealFrame(Header& header, uint64_t dataBytes, std::span<const std::byte> data);

 private:
  const std::string key_;
  Hmac hmac_;
  uint64_t next_ = 0;
};

// Checks the frames of one peer. One thread at a time, unless it says otherwise.
class Opener {
 public:
  explicit Opener(std::string key) : key_(std::move(key)), hmac_(key_) {}

  // Whether the peer has sealed it; the arguments are those of Sealer::sealFrame().
  bool isGenuine(const Header& header, uint64_t dataBytes, std::span<const std::byte> data);

  // Of a genuine frame: whether it has not come before. To be asked once.
  bool isNew(const Header& header) {
    return window_.accept(header.sequence);
  }

  // Any thread; the arguments are those of Sealer::sealContent().
  bool isContentGenuine(
      const Header& header, std::span<const std::byte> parkedBody, std::span<const std::byte> payload) const;

 private:
  const std::string key_;
  Hmac hmac_;
  ReplayWindow window_;
};

} // namespace torch_ucx_rpc::wire
