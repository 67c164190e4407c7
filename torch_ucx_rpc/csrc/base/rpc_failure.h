#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

// The failure of a call or of another RPC operation. Its kind tells programs what failed. The extension turns each kind
// into an exception, which torch_ucx_rpc/errors.py describes. torch's C++ treats an RpcFailure as a std::runtime_error.
class RpcFailure : public std::runtime_error {
 public:
  enum class Kind : uint8_t {
    kWorkerLost,
    kWorkerLeft,
    kShutDown,
    kTimedOut,
    kMessageRefused,
    kNotSent,
    kOutOfResources,
    kUnknownWorker,
    kRRefLost,
    kBarrierFailed,
    kForked,
    kEpochEnded,
  };

  // The parts of the sentence that programs may want alone. A part is empty if this worker does not know it.
  struct Details {
    std::string name = {}; // of the worker that the sentence is about
    std::optional<int> rank = {};
    std::string host = {};
    std::string cause = {};
    std::string resource = {}; // "memory", "files", "threads"
    std::optional<std::chrono::milliseconds> timeout = {};
    std::string group = {}; // of a channel
    std::optional<uint64_t> epoch = {}; // that the worker is in
  };

  RpcFailure(Kind kind, const std::string& sentence) : std::runtime_error(sentence), kind_(kind) {}
  RpcFailure(Kind kind, const std::string& sentence, Details details)
      : std::runtime_error(sentence), kind_(kind), details_(std::move(details)) {}

  Kind kind() const {
    return kind_;
  }
  const Details& details() const {
    return details_;
  }

 private:
  Kind kind_;
  Details details_;
};

} // namespace torch_ucx_rpc
