#include "peers/peer.h"

namespace torch_ucx_rpc {

Peer::Peer(Member member) : member_(std::move(member)) {
  if (!member_.sendKey.empty()) {
    sealer.emplace(member_.sendKey);
    opener.emplace(member_.receiveKey);
  }
}

std::string Peer::describe() const {
  return "worker '" + member_.name + "' (rank " + std::to_string(member_.rank) + ", pid " +
      std::to_string(member_.pid) + " on " + member_.host + ")";
}

Error Peer::lost(const Error& why) const {
  return {
      ErrorCode::kPeerFailed,
      "lost " + describe() + ": it has died or cannot be reached any more (" + why.message() + ")",
      why.message()};
}

bool Peer::moveTo(State state, Error why) {
  const std::lock_guard lock(mutex_);
  const State now = state_.load(std::memory_order_relaxed);
  if (now >= State::kLeft || now >= state) {
    return false;
  }
  whyGone_ = std::move(why);
  state_.store(state, std::memory_order_release);
  return true;
}

Error Peer::whyGone() const {
  const std::lock_guard lock(mutex_);
  return whyGone_;
}

} // namespace torch_ucx_rpc
