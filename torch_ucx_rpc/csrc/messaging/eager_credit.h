#pragma once

#include "peers/peer.h"

#include <cstdint>
#include <utility>

namespace torch_ucx_rpc {

// What a request whose body is sent at once, without being asked for, may add to what its receiver has taken in and not
// answered: the receive window cannot hold it back. Given back with the call.
class EagerCredit {
 public:
  // To a peer. Bodies up to kFreeBytes are not worth waiting for.
  static constexpr uint64_t kMaxBytes = 8 * 1024 * 1024;
  static constexpr uint64_t kFreeBytes = 4 * 1024;

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

  // False if there is no room for it; then the body is to wait at the sender.
  bool take(Peer& to, uint64_t bytes) {
    if (bytes <= kFreeBytes) {
      return true;
    }
    if (to.eagerBytesOpen.fetch_add(bytes, std::memory_order_relaxed) + bytes > kMaxBytes) {
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
