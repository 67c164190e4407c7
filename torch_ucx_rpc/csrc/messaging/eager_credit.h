#pragma once

#include "messaging/push_share.h"
#include "peers/peer.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace torch_ucx_rpc {

// A request's part of its sender's PushShare, if the body leaves at once, before the receiver asks for it. The end of
// the call gives the credit back, usually after the receiver has answered.
class EagerCredit {
 public:
  // Bodies above kSmallBytes may take only kMaxBytesOfLarger. They leave the rest of the share to small bodies, which
  // should not wait.
  static constexpr uint64_t kSmallBytes = 4 * 1024;
  static constexpr uint64_t kMaxBytesOfLarger = 8 * 1024 * 1024;
  // The bytes that a request costs its receiver in addition to its body.
  static constexpr uint64_t kOverhead = 512;

  EagerCredit() = default;
  EagerCredit(EagerCredit&& other) noexcept
      : to_(std::exchange(other.to_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  EagerCredit& operator=(EagerCredit&& other) noexcept {
    std::swap(to_, other.to_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~EagerCredit() {
    if (to_ != nullptr) {
      to_->eagerBytesOpen.fetch_sub(bytes_, std::memory_order_relaxed);
    }
  }

  // Takes credit for a request with a body of this size. Returns false if the share is used up. The body then goes by
  // rendezvous, and waits here until the receiver asks for it.
  bool take(Peer& to, uint64_t bodyBytes, const PushShare& share) {
    const uint64_t most = bodyBytes <= kSmallBytes ? share.bytes() : std::min(share.bytes(), kMaxBytesOfLarger);
    const uint64_t bytes = bodyBytes + kOverhead;
    // Adds before it compares, so that two threads cannot both take the last of the share.
    if (to.eagerBytesOpen.fetch_add(bytes, std::memory_order_relaxed) + bytes > most) {
      to.eagerBytesOpen.fetch_sub(bytes, std::memory_order_relaxed);
      return false;
    }
    to_ = &to;
    bytes_ = bytes;
    return true;
  }

 private:
  Peer* to_ = nullptr;
  uint64_t bytes_ = 0;
};

} // namespace torch_ucx_rpc
