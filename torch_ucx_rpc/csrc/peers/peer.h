#pragma once

#include "peers/latency_histogram.h"
#include "base/error.h"
#include "base/rpc_failure.h"
#include "transport/transport.h"
#include "wire/seal.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

// A worker's number in its job; torch calls it Rank.
using Rank = int16_t;

// What a worker publishes of itself and the others need to know.
struct Member {
  Rank rank = 0;
  std::string name;
  std::string host;
  // Which process it is: the id is unique within a pid namespace, until the process ends, and until the machine reboots.
  int64_t pid = 0;
  std::string bootId;
  uint64_t pidNamespace = 0;
  uint64_t processStartTime = 0; // clock ticks since boot
  uint64_t session = 0; // random; tells this life of the worker from an earlier one
  int64_t firstRRefId = 0; // that it makes in this life: from a random number on, where others may take its rank
  std::string address; // of its transport
  // In a job with a secret, see wire/seal.h; empty otherwise.
  std::string sendKey; // for frames to it
  std::string receiveKey; // for frames of it
  std::string joinKey; // for the first frame of anybody to it, in a dynamic group
};

// A worker of the job as this agent sees it, itself included.
class Peer {
 public:
  enum class State : uint8_t {
    kPresent,
    kLeaving, // it answers what it has been asked, and takes nothing new
    kLeft, // it said goodbye
    kFailed,
  };

  // Throws std::runtime_error where it has keys and there is no libcrypto.
  explicit Peer(Member member);

  // Constant after construction.
  const Member& member() const {
    return member_;
  }

  // Whether it can have made the id in this life, not one that had its rank before.
  bool canHaveMade(int64_t rrefId) const {
    constexpr int64_t kIdsOfALife = int64_t{1} << 40;
    return rrefId >= member_.firstRRefId && rrefId - member_.firstRRefId < kIdsOfALife;
  }

  // "worker 'ps' (rank 1, pid 4711 on node07)": how errors name it.
  std::string describe() const;
  // That it has died or cannot be reached, and how that was seen.
  Error lost(const Error& why) const;
  // A failure that is about this worker.
  RpcFailure failure(RpcFailure::Kind kind, const std::string& sentence, const std::string& cause = {}) const;
  // The failure of a call to a peer that takes none: lost, left, or leaving.
  RpcFailure failureOfGone() const;
  // The failure of a call over an error of this side or of the peer's, by its code.
  RpcFailure failureOver(const Error& error, const std::string& sentence) const;

  State state() const {
    return state_.load(std::memory_order_acquire);
  }
  // Present or leaving: messages reach it.
  bool isThere() const {
    return state() <= State::kLeaving;
  }
  // Only ever onwards in the order of State, and not from kLeft to kFailed: the first end counts. True if this call changed
  // the state.
  bool moveTo(State state, Error why);
  // Why it takes no calls; nothing while it is present.
  Error whyGone() const;

  std::atomic<uint64_t> callsSent{0};
  std::atomic<uint64_t> callsFailed{0}; // of those sent; what a Python function raises is an answer to torch
  std::atomic<uint64_t> callsReceived{0};
  std::atomic<int64_t> requestsOpen{0}; // received from it and not answered yet
  std::atomic<uint64_t> eagerBytesOpen{0}; // sent to it at once, with requests that it has not answered: see EagerCredit
  LatencyHistogram latencies; // of calls sent that did not fail
  std::atomic<uint64_t> bytesSent{0};
  std::atomic<uint64_t> bytesReceived{0};
  std::atomic<bool> hasAcknowledged{true}; // what this worker has announced last

  std::atomic<bool> isNeighbour{false}; // another worker of this machine
  std::atomic<bool> isWatched{false}; // ProcessWatch has been asked
  std::atomic<bool> needsHeartbeat{false}; // and could not

  // For how long nothing has come from it, as Heartbeat sees it.
  struct Silence {
    bool heardSinceCheck = false; // something has come since Heartbeat looked last
    bool isAsked = false; // for a sign of life
    std::chrono::milliseconds lasted{0};
  };

  // Guarded by the worker lock, but for what their headers say is for any thread:
  std::optional<EndpointId> endpoint; // set with the first message to it
  size_t messagesUnderWay = 0; // to it: not finished by the transport, those included whose turn has not come
  Silence silence;
  std::optional<wire::Sealer> sealer; // in a job with a secret, as is:
  std::optional<wire::Opener> opener;

 private:
  const Member member_;
  std::atomic<State> state_{State::kPresent};
  mutable std::mutex mutex_;
  Error whyGone_; // guarded by mutex_
};

} // namespace torch_ucx_rpc
