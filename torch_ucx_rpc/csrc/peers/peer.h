#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include "base/error.h"
#include "base/rpc_failure.h"
#include "peers/latency_histogram.h"

namespace torch_ucx_rpc {

class Connection; // messaging/connection.h

// A worker's number in its job. torch's C++ calls it worker_id_t.
using Rank = int16_t;

// The facts that a worker publishes about itself, because others need to know them.
struct Member {
  Rank rank = 0;
  std::string name;
  std::string host;
  // These four identify the process. A pid alone is unique only within a pid namespace, until the process ends or the
  // machine reboots.
  int64_t pid = 0;
  std::string bootId;
  uint64_t pidNamespace = 0;
  uint64_t processStartTime = 0; // clock ticks since boot
  std::string user; // the user that it runs as; UCX's shared memory is open to one user alone
  uint64_t session = 0; // random; distinguishes this life of the worker from earlier ones
  // Its first ids of RRefs, and of contexts of distributed autograd, in this life; random if other workers may take its
  // rank.
  int64_t firstRRefId = 0;
  int64_t firstContextId = 0;
  std::string address; // of its transport
  // Where it listens for Lifelines; port 0 where its transport needs none.
  std::string lifelineHost;
  uint16_t lifelinePort = 0;
  // Keys of a job with a secret, see wire/seal.h; empty otherwise.
  std::string sendKey; // for frames to this worker
  std::string receiveKey; // for frames from this worker
  std::string joinKey; // for the first frame of any worker to this one, in a dynamic group
};

// This worker, as others know it.
struct Identity {
  Rank rank = 0;
  std::string name;
  uint64_t session = 0; // random; distinguishes this life of the worker from others
};

// A worker of the job as this agent sees it: its identity, whether it is there, and the numbers that any thread may
// read. The agent itself is a peer too. Its Connection knows how messages reach the worker. Thread-safe, except
// `connection`.
class Peer {
 public:
  enum class State : uint8_t {
    kPresent,
    kLeaving, // it answers open requests, and takes no new ones
    kLeft, // it said goodbye
    kFailed,
  };

  // Throws std::runtime_error if the member has keys and there is no libcrypto. So its Connection need not throw later,
  // under the worker lock.
  explicit Peer(Member member);

  // Constant after construction.
  const Member& member() const {
    return member_;
  }

  // Whether this worker can have made the id in its present life, rather than a worker that had its rank before.
  bool canHaveMadeRRef(int64_t id) const {
    return isOfALife(member_.firstRRefId, id);
  }
  bool canHaveOpenedContext(int64_t id) const {
    return isOfALife(member_.firstContextId, id);
  }

  // The worker as errors name it: "worker 'ps' (rank 1, pid 4711 on node07)".
  std::string describe() const;
  // The error that the worker has died or cannot be reached; `why` says how that was seen.
  Error lost(const Error& why) const;
  // A failure that concerns this worker.
  RpcFailure failure(RpcFailure::Kind kind, const std::string& sentence, const std::string& cause = {}) const;
  // The failure of a call to a peer that takes none, because it is lost, has left, or is leaving.
  RpcFailure failureOfGone() const;
  // The failure of a call because of an error on either side. The error's code decides the kind.
  RpcFailure failureFrom(const Error& error, const std::string& sentence) const;

  State state() const {
    return state_.load(std::memory_order_acquire);
  }
  // Present or leaving: messages reach it.
  bool isThere() const {
    return state() <= State::kLeaving;
  }
  // Moves to a later state in the order of State. The first end counts, so kLeft never becomes kFailed. True if this
  // call changed the state.
  bool moveTo(State state, Error why);
  // Why the worker takes no calls; no error while it is present.
  Error whyGone() const;

  // Its process has certainly ended: its kernel says so. If this is false, a worker that failed may still run, out of
  // reach. Set before moveTo().
  std::atomic<bool> hasEnded{false};

  // Counted by the threads that make and serve calls; read by reports.
  std::atomic<uint64_t> callsSent{0};
  std::atomic<uint64_t> callsFailed{0}; // of those sent; an exception of a Python function counts as an answer
  std::atomic<uint64_t> callsReceived{0};
  std::atomic<int64_t> requestsOpen{0}; // received from it and not answered yet
  LatencyHistogram latencies; // of calls sent that did not fail
  // Bytes of open requests that were sent to it eagerly. EagerCredit counts them without the worker lock.
  std::atomic<uint64_t> eagerBytesOpen{0};

  // Set by the group and the monitor; read by any thread.
  std::atomic<bool> isNeighbour{false}; // another worker of this machine
  std::atomic<bool> hasAdmitted{true}; // false from this worker's join until the peer has acknowledged it
  std::atomic<bool> hasNotedLeave{true}; // false from this worker's leave until the peer has acknowledged it
  std::atomic<bool> isWatched{false}; // ProcessWatch has been asked to watch it
  // True if ProcessWatch cannot watch it, or if the peer may take this worker for dead because this process has lost
  // the connection. In the latter case the inbox sets it, under the worker lock.
  std::atomic<bool> needsHeartbeat{false};

  // Set by the monitor. True if its death shows without a failed endpoint: it has a lifeline, and the heartbeat notices
  // its silence.
  std::atomic<bool> isEndSeen{false};
  // True if messages outlast a failed endpoint to it, which is replaced. Only if isEndSeen.
  std::atomic<bool> mayResume{false};

  // Written under the worker lock; read by any thread. True if it has been silent for the limit, or the endpoint to it
  // has failed, and Heartbeat has not heard it since. The end of the peer does not change it.
  std::atomic<bool> isResuming{false};
  std::atomic<uint64_t> timesResumed{0}; // how often isResuming has become true

  std::atomic<bool> isMet{false}; // a message has been sent to it, or has come from it
  std::atomic<uint64_t> bytesSent{0};
  std::atomic<uint64_t> bytesReceived{0};
  std::atomic<uint64_t> resendBytes{0}; // of messages that are kept until it has them: see KeptMessages
  // True if it runs on this machine and shared memory does not reach it. It may be in another pid namespace: UCX would
  // look for its process by an id that no process has here, or that another process has. It may belong to another user,
  // whose memory UCX cannot open. In these two cases the group sets this before the first message. Or one of the two
  // workers may get nothing more over shared memory (RepairState::kUnrepairable).
  std::atomic<bool> isOverNetwork{false};

  // Null before the first message to or from it; see Connections::of(). Guarded by the worker lock.
  Connection* connection = nullptr;

 private:
  static bool isOfALife(int64_t first, int64_t id) {
    constexpr int64_t kIdsOfALife = int64_t{1} << 40;
    return id >= first && id - first < kIdsOfALife;
  }

  const Member member_;
  std::atomic<State> state_{State::kPresent};
  mutable std::mutex mutex_;
  Error whyGone_; // guarded by mutex_
};

// Lets an object clean up after a peer that is gone.
class PeerObserver {
 public:
  virtual ~PeerObserver() = default;
  // Called once for each peer that left or failed, after its state says so, on any thread, without the worker lock.
  virtual void onPeerGone(Peer& peer) = 0;
};

} // namespace torch_ucx_rpc
