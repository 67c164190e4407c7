#include "peers/peer.h"

#include "base/hmac.h"

namespace torch_ucx_rpc {

Peer::Peer(Member member) : member_(std::move(member)) {
  if (!member_.sendKey.empty()) {
    (void)Hmac(member_.sendKey);
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

RpcFailure Peer::failure(RpcFailure::Kind kind, const std::string& sentence, const std::string& cause) const {
  return {kind, sentence, {.name = member_.name, .rank = member_.rank, .host = member_.host, .cause = cause}};
}

RpcFailure Peer::failureOfGone() const {
  const Error why = whyGone();
  const bool hasLeft = why.code() == ErrorCode::kShutDown;
  return failure(hasLeft ? RpcFailure::Kind::kWorkerLeft : RpcFailure::Kind::kWorkerLost, why.message(), why.cause());
}

// An error code that is not listed here means that the message did not get through.
RpcFailure Peer::failureFrom(const Error& error, const std::string& sentence) const {
  RpcFailure::Kind kind = RpcFailure::Kind::kNotSent;
  std::string resource;
  switch (error.code()) {
    case ErrorCode::kProtocol:
      kind = RpcFailure::Kind::kMessageRefused;
      break;
    case ErrorCode::kOutOfMemory:
      resource = "memory";
      break;
    case ErrorCode::kOutOfFiles:
      resource = "files";
      break;
    case ErrorCode::kOutOfThreads:
      resource = "threads";
      break;
    default:
      break;
  }
  if (!resource.empty()) {
    kind = RpcFailure::Kind::kOutOfResources;
  }
  return {kind, sentence, {member_.name, member_.rank, member_.host, error.message(), std::move(resource), {}, {}, {}}};
}

bool Peer::moveTo(State state, Error why) {
  const std::lock_guard lock(mutex_);
  const State now = state_.load(std::memory_order_relaxed);
  // A worker says goodbye right before its process is seen to end. The first of the two events counts.
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
