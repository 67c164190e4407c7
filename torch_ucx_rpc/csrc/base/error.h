#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

enum class ErrorCode : uint8_t {
  kOk = 0,
  kCanceled, // given up on by this side; nothing is wrong with the peer
  kPeerFailed, // the peer or the way to it is gone
  kTimedOut,
  kOutOfMemory,
  kOutOfFiles, // this process may open no more of them
  kOutOfThreads, // this process may have no more of them for requests
  kProtocol, // the peer sent something that the wire format does not allow
  kShutDown, // this agent, or the peer, has shut down
  kDeviceFailed, // a device of this side, or what a program does there
  kInternal,
};

// An outcome passed between threads as a value. It becomes an exception once, where the agent meets torch
// or Python, and its message is written for the person who reads that exception.
class [[nodiscard]] Error {
 public:
  Error() = default;
  // `cause`: the part of the message that says how it was seen, where programs may want it alone.
  Error(ErrorCode code, std::string message, std::string cause = {})
      : code_(code), message_(std::move(message)), cause_(std::move(cause)) {}

  explicit operator bool() const {
    return code_ != ErrorCode::kOk;
  }
  ErrorCode code() const {
    return code_;
  }
  const std::string& message() const {
    return message_;
  }
  const std::string& cause() const {
    return cause_;
  }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
  std::string cause_;
};

} // namespace torch_ucx_rpc
