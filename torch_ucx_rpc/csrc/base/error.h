#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

enum class ErrorCode : uint8_t {
  kOk = 0,
  kCanceled, // this side gave the operation up
  kPeerFailed, // the peer, or the way to it, is gone
  kTimedOut, // the peer, or the way to it, did not answer in time
  kOutOfMemory,
  kOutOfFiles, // this process may not open more files
  kOutOfResources, // another resource of this process or machine is used up: shared memory, queue pairs, ports
  kOutOfThreads, // this process may not have more threads for requests
  kProtocol, // the peer sent something that the wire format does not allow
  kShutDown, // this agent, or the peer, has shut down
  kDeviceFailed, // a device of this process failed, or the program that runs on it
  kInternal, // a fault of this package or of UCX
};

// True for failures of this process or of one message. Such a failure says nothing about the peer, which may be
// healthy. So it must not mark the peer dead, and a later attempt may work. Only the peer's own error or silence marks
// it dead.
//
// kOutOfMemory is local. A rendezvous also completes with it if the receiver has no memory, but that receiver is alive.
// kInternal is not local: another attempt would fail too.
//
// A table before Outbox::finish() says what follows for each kind of message.
constexpr bool isLocal(ErrorCode code) {
  switch (code) {
    case ErrorCode::kCanceled:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kOutOfFiles:
    case ErrorCode::kOutOfResources:
    case ErrorCode::kOutOfThreads:
    case ErrorCode::kDeviceFailed:
      return true;
    case ErrorCode::kOk:
    case ErrorCode::kPeerFailed:
    case ErrorCode::kTimedOut:
    case ErrorCode::kProtocol:
    case ErrorCode::kShutDown:
    case ErrorCode::kInternal:
      break;
  }
  return false;
}

// The outcome of an operation, passed between threads as a value. It becomes an exception only where the agent meets
// torch or Python. Its message is written for the person who reads that exception.
class [[nodiscard]] Error {
 public:
  Error() = default;
  // `cause` is the part of the message that says how the failure was noticed. Programs may want it alone.
  Error(ErrorCode code, std::string message, std::string cause = {})
      : code_(code), message_(std::move(message)), cause_(std::move(cause)) {}

  // True if something failed.
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
