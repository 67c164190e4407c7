#pragma once

#include "base/unique_function.h"
#include "messaging/message.h"
#include "peers/barrier.h"
#include "runtime/event_batch.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Interfaces of the objects that act on events, one for each kind. Callers do not hold the worker lock, unless a
// function says otherwise. No function may throw.
namespace torch_ucx_rpc {

// Work that a batch does last, on the thread that dispatches it. It may run user code, so everything else in the batch
// comes first.
using WorkAtEnd = std::vector<UniqueFunction<void()>>;

// Answers to this worker's calls.
class AnswerHandler {
 public:
  virtual ~AnswerHandler() = default;
  // Whether a call to this peer still waits for its answer. Any thread, the worker lock held or not.
  virtual bool isAwaited(const Peer& from, uint64_t callId) const = 0;
  // Completes the call: through `atEnd` if `driver` may do it, on an agent thread otherwise.
  virtual void onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) = 0;
  // The callee has refused the request and not run it, or cannot send its answer.
  virtual void onRefused(Peer& by, uint64_t callId, const Error& why) = 0;
  // The answer arrived, but could not be received.
  virtual void onAnswerRejected(Peer& from, uint64_t callId, const Error& why) = 0;
  // The request was not sent, or only in part.
  virtual void onRequestNotSent(Peer& to, uint64_t callId, const Error& why) = 0;
};

// Requests of other workers.
class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  // Whether a driver runs the request at once, because that takes microseconds and no user code.
  virtual bool mayRunOnDriver(const IncomingMessage& request) const = 0;
  // Queues a request. Called in the order of arrival.
  virtual void onRequest(IncomingMessage request) = 0;
  // Runs a request for which mayRunOnDriver() is true, on the calling thread.
  virtual void runOnDriver(IncomingMessage request) = 0;
  // The request arrived, but could not be received.
  virtual void onRequestRejected(Peer& from, uint64_t callId, const Error& why) = 0;
  // The answer was not sent, or only in part. In the latter case the caller has some parts, and takes no other answer.
  virtual void onAnswerNotSent(Peer& to, uint64_t callId, const Error& why, bool hasLeftInPart) = 0;
};

// Ends of peers.
class PeerHandler {
 public:
  virtual ~PeerHandler() = default;
  virtual void onGoodbye(Peer& from) = 0;
  virtual void onFailure(Peer& peer, Error why) = 0;
  // The endpoint to the peer has failed. The peer may be healthy, and another endpoint will be made.
  virtual void onBroken(Peer& peer) = 0;
  // A control frame was not sent. No call waits for it, but another worker may wait for its effect.
  virtual void onControlNotSent(Peer& to, const Error& why) = 0;
};

// Changes of the group, and its barriers.
class GroupHandler {
 public:
  virtual ~GroupHandler() = default;
  // A process that is not a member asks to become one.
  virtual void onJoin(uint64_t session, Bytes record) = 0;
  virtual void onLeave(Peer& from) = 0;
  virtual void onAcknowledge(Peer& from) = 0;
  virtual void onBarrierArrive(Peer& from, uint64_t round, const Barrier::Arrivals& arrivals) = 0;
  virtual void onBarrierRelease(Peer& from, uint64_t round, const Barrier::Result& result) = 0;
};

// Values that workers put under tags (rpc/channel.h).
class PutHandler {
 public:
  // The fate of a value whose spans wait at its sender.
  struct Verdict {
    enum class Fate : uint8_t { kReceive, kHold, kDrop };
    Fate fate = Fate::kReceive;
    std::vector<c10::DataPtr> into; // memory for the spans, by their index; null: memory of the pool
  };

  virtual ~PutHandler() = default;
  // Called with the worker lock. A value that is held waits until Messenger::receivePut() or dropPut().
  virtual Verdict onPutAnnounced(
      Peer& from, const wire::Header& header, std::span<const std::byte> body, std::span<const uint64_t> spanBytes) = 0;
  // A value that was dropped comes without its spans.
  virtual void onPut(IncomingMessage value, const std::optional<Driver>& driver) = 0;
  // The value arrived, but could not be received.
  virtual void onPutRejected(Peer& from, uint64_t number, const Error& why) = 0;
  // The transport is done with the memory of a value. The value has left unless `error` is set.
  virtual void onPutSent(Peer& to, uint64_t number, const Error& error) = 0;
  virtual void onTaken(Peer& from, uint64_t bytes) = 0;
  virtual void onPutRefused(Peer& by, const std::string& group, uint64_t epoch) = 0;
};

// The handlers of an agent. All are set before the first member is added.
struct EventHandlers {
  AnswerHandler* answers = nullptr;
  RequestHandler* requests = nullptr;
  PeerHandler* peers = nullptr;
  GroupHandler* group = nullptr;
  PutHandler* puts = nullptr;
};

} // namespace torch_ucx_rpc
