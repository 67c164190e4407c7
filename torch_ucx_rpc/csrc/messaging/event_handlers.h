#pragma once

#include "base/unique_function.h"
#include "messaging/message.h"
#include "peers/barrier.h"
#include "runtime/event_batch.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// The objects that act on what messages bring about, one interface for each kind of event. All are called without the
// worker lock unless they say otherwise, and must not throw.
namespace torch_ucx_rpc {

// Work for the end of a batch, on the same thread: everything else of the batch comes first, since this runs user code.
using WorkAtEnd = std::vector<UniqueFunction<void()>>;

// Answers to this worker's calls.
class AnswerHandler {
 public:
  virtual ~AnswerHandler() = default;
  // Whether a call to this peer still waits for its answer. Any thread, the worker lock held or not.
  virtual bool isAwaited(const Peer& from, uint64_t callId) const = 0;
  // Completes the call: at the end of the batch where `driver` may do that, on an agent thread otherwise.
  virtual void onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) = 0;
  // The callee has not run the request.
  virtual void onRefused(Peer& by, uint64_t callId, const Error& why) = 0;
  // The answer arrived but could not be taken in.
  virtual void onAnswerRejected(Peer& from, uint64_t callId, const Error& why) = 0;
  // The request did not leave, or not whole.
  virtual void onRequestNotSent(Peer& to, uint64_t callId, const Error& why) = 0;
};

// Requests of other workers.
class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  // Whether running it is so short, and free of user code, that a driver does it at once.
  virtual bool mayRunOnDriver(const IncomingMessage& request) const = 0;
  // In the order of arrival; queues the request.
  virtual void onRequest(IncomingMessage request) = 0;
  // Runs one of those that a driver may.
  virtual void runOnDriver(IncomingMessage request) = 0;
  virtual void onRequestRejected(Peer& from, uint64_t callId, const Error& why) = 0;
  virtual void onAnswerNotSent(Peer& to, uint64_t callId, const Error& why) = 0;
};

// Peers that end.
class PeerHandler {
 public:
  virtual ~PeerHandler() = default;
  virtual void onGoodbye(Peer& from) = 0;
  virtual void onFailure(Peer& peer, Error why) = 0;
  // A frame that is neither request nor answer: nobody waits for it, but somebody may for what it asks for.
  virtual void onControlNotSent(Peer& to, const Error& why) = 0;
};

// Members of the group.
class GroupHandler {
 public:
  virtual ~GroupHandler() = default;
  // A process that is no member yet asks to become one.
  virtual void onJoin(uint64_t session, Bytes record) = 0;
  virtual void onLeave(Peer& from) = 0;
  virtual void onAcknowledge(Peer& from) = 0;
  virtual void onBarrierArrive(Peer& from, uint64_t round, int64_t value) = 0;
  virtual void onBarrierRelease(uint64_t round, Barrier::Result result) = 0;
};

// All of them, each set before the first member is added.
struct EventHandlers {
  AnswerHandler* answers = nullptr;
  RequestHandler* requests = nullptr;
  PeerHandler* peers = nullptr;
  GroupHandler* group = nullptr;
};

} // namespace torch_ucx_rpc
