#pragma once

#include "peers/peer.h"

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

namespace torch_ucx_rpc {

// Why a call failed, where programs tell failures apart by type: the extension turns each into its exception of
// torch_ucx_rpc/errors.py. Through torch's C++ it travels as the std::runtime_error that it is.
class CallFailure : public std::runtime_error {
 public:
  enum class Kind : uint8_t {
    kWorkerLost, // it died or cannot be reached
    kWorkerLeft, // it said goodbye, or is leaving
    kTimedOut,
    kRefused, // the callee did not run the call: it had no memory or no thread for it, or could not read it
    kNotSent, // this worker could not send the request, or could not take in the answer
    kShutDown, // this worker's RPC has been shut down
  };

  CallFailure(Kind kind, const std::string& what, const Peer& peer) : CallFailure(kind, what, peer, {}, {}) {}
  CallFailure(
      Kind kind,
      const std::string& what,
      const Peer& peer,
      std::string cause,
      std::optional<std::chrono::milliseconds> timeout)
      : std::runtime_error(what),
        kind_(kind),
        name_(peer.member().name),
        rank_(peer.member().rank),
        host_(peer.member().host),
        cause_(std::move(cause)),
        timeout_(timeout) {}

  // For a call to a peer that takes none any more: lost, left, or leaving.
  static CallFailure ofGone(const Peer& peer) {
    const Error why = peer.whyGone();
    const Kind kind = why.code() == ErrorCode::kShutDown ? Kind::kWorkerLeft : Kind::kWorkerLost;
    return {kind, why.message(), peer, why.cause(), {}};
  }

  Kind kind() const {
    return kind_;
  }
  // Of the callee.
  const std::string& name() const {
    return name_;
  }
  Rank rank() const {
    return rank_;
  }
  const std::string& host() const {
    return host_;
  }
  // How the loss of a worker was seen; empty for other kinds.
  const std::string& cause() const {
    return cause_;
  }
  // The call's limit; nothing for other kinds.
  std::optional<std::chrono::milliseconds> timeout() const {
    return timeout_;
  }

 private:
  Kind kind_;
  std::string name_;
  Rank rank_;
  std::string host_;
  std::string cause_;
  std::optional<std::chrono::milliseconds> timeout_;
};

} // namespace torch_ucx_rpc
