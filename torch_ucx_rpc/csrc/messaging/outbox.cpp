#include "messaging/outbox.h"

#include "base/warnings.h"
#include "messaging/control_frames.h"
#include "runtime/worker_mutex.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace torch_ucx_rpc {

using Messages = Connection::Outgoing::Messages;

namespace {

// True for errors that another endpoint would not mend.
bool isFinal(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kDeviceFailed:
    case ErrorCode::kInternal:
    case ErrorCode::kProtocol:
    case ErrorCode::kShutDown:
      return true;
    default:
      return false;
  }
}

bool isQueued(const OutgoingMessage& message) {
  return wire::isMessage(message.header.kind);
}

// Takes the request with this id. Returns null if no message here is that request.
std::unique_ptr<OutgoingMessage> takeRequest(Messages& messages, uint64_t callId) {
  const auto found = std::ranges::find_if(messages, [&](const std::unique_ptr<OutgoingMessage>& message) {
    return message->header.kind == wire::Kind::kRequest && message->header.callId == callId;
  });
  if (found == messages.end()) {
    return nullptr;
  }
  std::unique_ptr<OutgoingMessage> taken = std::move(*found);
  messages.erase(found);
  return taken;
}

} // namespace

Error Outbox::connect(Connection& connection, const OutgoingMessage& message) {
  if (isClosed_) {
    return {ErrorCode::kShutDown, "RPC has been shut down on this worker"};
  }
  Peer& peer = connection.peer();
  // A goodbye leaves even over a closed connection: it tells the peer that this worker has given it up.
  if (connection.state() == Connection::State::kClosed && message.header.kind != wire::Kind::kGoodbye) {
    return peer.whyGone();
  }
  if (connection.endpoint().has_value() || connection.state() == Connection::State::kResuming) {
    return {};
  }
  // Connects at the first message, not at the start: a worker of a large job calls few others.
  return makeEndpoint(connection);
}

Error Outbox::makeEndpoint(Connection& connection) {
  const Peer& peer = connection.peer();
  const std::string& address = peer.member().address;
  EndpointId endpoint = 0;
  Error error = peer.isOverNetwork.load() ? transport_.connectOverNetwork(address, endpoint)
                                          : transport_.connect(address, endpoint);
  if (!error) {
    connection.setEndpoint(endpoint);
  }
  return error;
}

Error Outbox::moveToNetwork(Connection& connection) {
  assertHoldsWorkerLock();
  Peer& peer = connection.peer();
  if (!canLeave(connection) || peer.isOverNetwork.load()) {
    return {};
  }
  EndpointId endpoint = 0;
  if (Error error = transport_.connectOverNetwork(peer.member().address, endpoint)) {
    return error;
  }
  peer.isOverNetwork.store(true);
  if (connection.endpoint().has_value()) {
    connection.paths.emplace_front();
  }
  connection.setEndpoint(endpoint);
  connections_.makeReady(connection); // waiting messages leave over the network
  return {};
}

void Outbox::send(std::unique_ptr<OutgoingMessage> message) {
  assertHoldsWorkerLock();
  Connection& connection = connections_.of(*message->to);
  if (message->header.kind == wire::Kind::kJoin) {
    connection.outgoing.join = Bytes(std::span<const std::byte>(message->body));
  }
  if (!mustWait(connection, *message)) {
    enqueue(connection, std::move(message));
    return;
  }
  if (message->waitsFor == OutgoingMessage::Wait::kDevice) {
    connections_.keepLooking(connection);
  }
  connection.outgoing.held.push_back(std::move(message));
}

void Outbox::sendControl(Peer& to, wire::Kind kind, uint64_t callId, Bytes body) {
  auto message = std::make_unique<OutgoingMessage>();
  message->to = &to;
  message->address(kind, self_.session, self_.rank, to.member().session, callId);
  message->body = std::move(body);
  send(std::move(message));
}

bool Outbox::isReady(const Connection& connection, OutgoingMessage& message) const {
  if (!canLeave(connection)) {
    return true;
  }
  try {
    return message.pendingWork.isDone();
  } catch (const std::exception& failure) {
    message.error = deviceFailed(failure);
    return true;
  }
}

bool Outbox::mustWait(const Connection& connection, OutgoingMessage& message) const {
  using Wait = OutgoingMessage::Wait;
  const wire::Kind kind = message.header.kind;
  // A goodbye does not wait for admission, which this worker no longer wants.
  if (connection.isJoining() && kind != wire::Kind::kJoin && kind != wire::Kind::kGoodbye && !isClosed_) {
    message.waitsFor = Wait::kAdmission;
  } else if (message.waitsFor != Wait::kRetry) {
    message.waitsFor = isReady(connection, message) ? Wait::kNothing : Wait::kDevice;
  }
  return message.waitsFor != Wait::kNothing;
}

void Outbox::sendHeld(Connection& connection) {
  for (std::unique_ptr<OutgoingMessage>& message : std::exchange(connection.outgoing.held, {})) {
    send(std::move(message)); // puts it back if it has to wait longer
  }
}

void Outbox::enqueue(Connection& connection, std::unique_ptr<OutgoingMessage> message) {
  message->isUnderWay = true;
  ++connection.outgoing.underWay;
  // Messages that are about to fail take no room.
  OutgoingLoad* room = nullptr;
  if (isQueued(*message) && canLeave(connection) && !message->error) {
    const size_t queue = Connection::queueOf(*message);
    auto& waiting = connection.outgoing.waiting[queue];
    room = &connection.path().loads[queue];
    // Even if there is room, a message does not pass those that wait.
    if (!waiting.empty() || connection.state() == Connection::State::kResuming || !room->hasRoomFor(*message, share_)) {
      waiting.emplace(message->header.callId, std::move(message));
      return;
    }
  }
  start(connection, std::move(message), room);
}

void Outbox::startDeferred(Connection& connection) {
  assertHoldsWorkerLock();
  if (const std::string why = std::exchange(connection.outgoing.whyBroken, {}); !why.empty()) {
    if (connection.state() == Connection::State::kOpen && connection.mayResume()) {
      transport_.abandon(*connection.endpoint());
      connection.breakOff(why);
      events_.addBreak(connection.peer());
    }
  }
  if (std::exchange(connection.outgoing.mustSendAgain, false) && connection.state() == Connection::State::kOpen) {
    sendAgain(connection);
    sendControl(connection.peer(), wire::Kind::kPong); // a later frame: see Outgoing::sentAgainBelow
  }
  if (connection.outgoing.kept.hasEnded()) {
    endKept(connection);
  }
  if (std::exchange(connection.mustAcknowledge, false)) {
    acknowledge(connection);
  }
  sendHeld(connection);
  for (const uint64_t callId : std::exchange(connection.outgoing.withdrawn, {})) {
    if (canLeave(connection)) {
      sendControl(connection.peer(), wire::Kind::kCancel, callId);
    }
  }
  if (connection.state() == Connection::State::kResuming) {
    return;
  }
  for (size_t queue = 0; queue < Connection::kQueues; ++queue) {
    const auto& waiting = connection.outgoing.waiting[queue];
    while (!waiting.empty() && connection.path().loads[queue].hasRoomFor(*waiting.begin()->second, share_)) {
      startFirst(connection, queue);
    }
  }
}

bool Outbox::cancel(Peer& to, uint64_t callId) {
  assertHoldsWorkerLock();
  if (to.connection == nullptr) {
    return false;
  }
  Connection::Outgoing& outgoing = to.connection->outgoing;
  std::unique_ptr<OutgoingMessage> given = takeRequest(outgoing.held, callId);
  // The caller of cancel() does not know how the body travels.
  for (const bool isEager : {true, false}) {
    if (given == nullptr) {
      if (auto queued = outgoing.waiting[Connection::queueOf(wire::Kind::kRequest, isEager)].extract(callId)) {
        given = std::move(queued.mapped());
        --outgoing.underWay;
      }
    }
  }
  if (given == nullptr) {
    return false; // the transport has it, or has had it: only the callee can drop it now
  }
  given->error = callGivenUp();
  // Not destroyed here: the end of its tensors may run user code, which must not run under the worker lock.
  events_.addSent(std::move(given));
  return true;
}

void Outbox::startFirst(Connection& connection, size_t queue) {
  auto& waiting = connection.outgoing.waiting[queue];
  start(connection, std::move(waiting.extract(waiting.begin()).mapped()), &connection.path().loads[queue]);
}

void Outbox::failWaiting(Connection& connection) {
  retryStranded(connection);
  for (size_t queue = 0; queue < Connection::kQueues; ++queue) {
    while (!connection.outgoing.waiting[queue].empty()) {
      startFirst(connection, queue);
    }
  }
}

void Outbox::start(Connection& connection, std::unique_ptr<OutgoingMessage> owned, OutgoingLoad* room) {
  OutgoingMessage& message = *owned.release(); // KeptMessages owns it next, or finish() at its end
  if (room != nullptr) {
    message.takesRoomOf = room;
    room->account(message, true);
  }
  if (Error error = message.error ? message.error : connect(connection, message)) {
    message.unfinished = 1;
    finish(message, /*endpoint=*/0, 1, std::move(error));
    return;
  }
  Peer& peer = connection.peer();
  peer.isMet.store(true, std::memory_order_relaxed);
  peer.bytesSent.fetch_add(message.totalBytes(), std::memory_order_relaxed);
  const wire::Kind kind = message.header.kind;
  const bool isNumbered = kind != wire::Kind::kJoin && kind != wire::Kind::kReceived;
  const bool isKept = isNumbered && connection.mayResume();
  KeptMessages& kept = connection.outgoing.kept;
  if (isKept || (isNumbered && connection.sealer.has_value())) {
    kept.number(message); // in the order in which the frames leave
  }
  const wire::ReplayWindow& received = connection.incoming.received;
  message.forEachFrame([&](wire::Header& header, bool /*hasArrived*/) {
    header.acknowledged = static_cast<uint32_t>(received.firstMissing());
  });
  if (received.missing().empty()) {
    connection.incoming.unacknowledgedBytes = 0;
  }
  if (isKept) {
    kept.add(std::unique_ptr<OutgoingMessage>(&message));
    peer.resendBytes.store(kept.bytes(), std::memory_order_relaxed);
  }
  if (connection.endpoint().has_value()) {
    sendFrames(connection, message);
  } else if (!isKept) { // a goodbye, or a message that resume() sends again; a kept message waits for an endpoint
    message.unfinished = 1;
    finish(message, /*endpoint=*/0, 1, {ErrorCode::kCanceled, "there is no endpoint at present"});
  }
}

void Outbox::sendFrames(Connection& connection, OutgoingMessage& message) {
  const EndpointId endpoint = *connection.endpoint();
  size_t left = 0;
  message.forEachFrame([&](wire::Header& header, bool hasArrived) {
    header.endpoint = message.isKept ? connection.outgoing.endpoints : 0;
    left += hasArrived ? 0 : 1;
  });
  message.sealFrames(connection.sealer);
  if (!std::exchange(message.isUnderWay, true)) {
    ++connection.outgoing.underWay;
  }
  message.unfinished += left; // before the first send, which may complete at once
  for (OutgoingMessage::Piece& piece : message.pieces) {
    if (piece.hasArrived) {
      continue;
    }
    --left;
    const auto onDone = [this, &message, endpoint](Error error) {
      message.to->connection->silence.heardSinceCheck |= !error; // the peer has fetched it
      finish(message, endpoint, 1, std::move(error));
    };
    transport_.send(endpoint, piece.header, piece.bytes, SendMode::kRendezvous, onDone, piece.memory);
    // The message is still there: its body, which has not been sent, counts as unfinished.
    if (message.error) {
      finish(message, endpoint, left, {}); // the later pieces and the body do not leave
      return;
    }
    message.hasLeftInPart = true;
  }
  if (!message.hasBodyArrived) {
    // This send may finish the message at once, and destroy it. Do not touch it afterwards. The end of an eager send is
    // not a sign of life: UCX may have copied the bytes before the peer reads them.
    const SendMode mode = message.isBodyEager() ? SendMode::kEager : SendMode::kRendezvous;
    transport_.send(endpoint, message.header, message.body, mode, [this, &message, endpoint](Error error) {
      finish(message, endpoint, 1, std::move(error));
    });
  }
}

// The consequence of an error. "Local" errors (isLocal() in base/error.h) are this process's, and say nothing about the
// peer. All others count as the peer's.
//
//   message        error        what follows, and where
//   request        any          its call fails (CallClient::onRequestNotSent()); this alone ends no peer
//   answer         a device's   an answer with the error goes instead (RequestServer::onAnswerNotSent())
//   answer         local        it strands here, and is sent again until it has left
//   answer         the peer's   a refusal goes instead (RequestServer::onAnswerNotSent())
//   put            a device's   the put fails (Channel::onPutSent())
//   put            local        it strands here, and is sent again until it has left
//   put            the peer's   the put fails (Channel::onPutSent())
//   control frame  local        it strands here, and is sent again until it has left
//   control frame  the peer's   the peer is lost (PeerMonitor::onControlNotSent())
//   a join         any          if it has left and mayResume(), it leaves again over the next endpoint (resume())
//   an endpoint    any          if mayResume(), Retries makes another endpoint (Inbox::onEndpointFailed()); otherwise:
//   an endpoint    local        the next message makes another endpoint
//   an endpoint    the peer's   the peer is lost (PeerMonitor::onFailure())
//
// A message that has left in part never strands. At its first error, withdraw() tells the receiver, unless the message
// is a put. Once the peer is gone or the outbox is closed, nothing strands, and no frame tells the receiver.
//
// A message ends once: when the transport is done with all its parts. A kept message (Connection::mayResume()) ends
// only if, in addition, the peer has it or it has failed. Most errors only break its connection.
void Outbox::finish(OutgoingMessage& message, EndpointId endpoint, size_t parts, Error error) {
  Connection& connection = *message.to->connection;
  const bool hasFailed = static_cast<bool>(error);
  if (hasFailed && !message.error) {
    const bool isSentAgain =
        message.isKept || (message.header.kind == wire::Kind::kJoin && connection.state() != Connection::State::kUnmet);
    if (isSentAgain && canLeave(connection) && !isFinal(error) && connection.mayResume()) {
      if (connection.endpoint() == endpoint) {
        connection.outgoing.whyBroken = "an operation over it has failed";
        connections_.makeReady(connection);
      }
    } else {
      message.error = std::move(error);
      if (message.hasLeftInPart && canLeave(connection)) {
        withdraw(connection, message);
      }
    }
  }
  // The other parts may be under way for long after an error. UCX uses their memory until it has called back.
  message.unfinished -= parts;
  if (message.unfinished != 0) {
    return;
  }
  if (!hasFailed || !message.isKept) {
    freeRoom(connection, message);
  }
  if (message.isKept) { // the caller may be sending it, so endKept() destroys it, in the next round
    if (!canLeave(connection) || message.error || message.hasArrived()) {
      connection.outgoing.kept.lookAtAll();
      if (isClosed_) {
        endKept(connection); // there is no further round; the transport is being closed, so nothing is being sent
      } else {
        connections_.makeReady(connection);
      }
    }
    return;
  }
  std::unique_ptr<OutgoingMessage> owned(&message);
  if (owned->header.kind == wire::Kind::kReceived) {
    owned->error = {}; // a later kReceived will tell the peer the same
  }
  // A message that has left in part is not sent again: its receiver has some of the parts. A device that has failed
  // will fail again.
  if (isLocal(owned->error.code()) && owned->error.code() != ErrorCode::kDeviceFailed && !owned->hasLeftInPart &&
      canLeave(connection) && owned->header.kind != wire::Kind::kRequest) {
    owned->waitsFor = OutgoingMessage::Wait::kRetry;
    connection.outgoing.held.push_back(std::move(owned));
    ++stranded_;
    return;
  }
  events_.addSent(std::move(owned));
}

// Parts by rendezvous take room until the transport is done with them. A kept eager body takes room until the peer has
// it.
void Outbox::freeRoom(Connection& connection, OutgoingMessage& message) {
  Connection::Outgoing& outgoing = connection.outgoing;
  if (std::exchange(message.isUnderWay, false)) {
    --outgoing.underWay;
  }
  const bool isEager = message.rendezvousParts() == 0;
  if (message.takesRoomOf != nullptr && (!isEager || !message.isKept || message.hasArrived() || message.error)) {
    std::exchange(message.takesRoomOf, nullptr)->account(message, false);
    // A transport callback must not send, so startDeferred() fills the room.
    if (!outgoing.waiting[Connection::queueOf(message)].empty()) {
      connections_.makeReady(connection);
    }
  }
}

void Outbox::withdraw(Connection& connection, const OutgoingMessage& message) {
  if (message.header.kind == wire::Kind::kPut) {
    return; // the receiver keeps the parts that have come until this worker is gone
  }
  if (message.header.kind == wire::Kind::kRequest) {
    connection.outgoing.withdrawn.push_back(message.header.callId); // a transport callback must not send
    connections_.makeReady(connection);
  } else {
    events_.addCutAnswer(connection.peer(), message.header.callId, message.error);
  }
}

// ----------------------------------------------------------------------- resumption (docs/development/connection.md)

void Outbox::endKept(Connection& connection) {
  KeptMessages& kept = connection.outgoing.kept;
  const bool isOver = !canLeave(connection);
  for (std::unique_ptr<OutgoingMessage>& message : kept.takeEnded(isOver)) {
    freeRoom(connection, *message);
    if (message->error && !isOver && connection.mayResume()) {
      for (OutgoingMessage* pong : kept.replace(*message)) {
        if (connection.endpoint().has_value()) {
          sendFrames(connection, *pong);
        }
      }
    }
    events_.addSent(std::move(message));
  }
  connection.peer().resendBytes.store(kept.bytes(), std::memory_order_relaxed);
}

void Outbox::resume(Connection& connection) {
  assertHoldsWorkerLock();
  if (isClosed_ || connection.state() != Connection::State::kResuming) {
    return;
  }
  Peer& peer = connection.peer();
  // Warns only now: if the peer's process has ended, the peer is lost before this.
  if (const std::string why = std::exchange(connection.whyBroken, {}); !why.empty()) {
    warn(
        "the connection to " + peer.describe() + " has failed (" + why +
        "), and nothing says that its process has ended: another connection takes its place, messages that have not "
        "arrived are sent again, and calls go on");
  }
  if (makeEndpoint(connection)) {
    connection.roundsToResume = 1;
    return;
  }
  if (connection.isJoining()) {
    sendControl(peer, wire::Kind::kJoin, 0, std::move(connection.outgoing.join));
  }
  sendAgain(connection);
  acknowledge(connection); // the peer need not send arrived messages again
  connections_.makeReady(connection); // waiting messages leave
}

void Outbox::sendAgain(Connection& connection) {
  for (const std::unique_ptr<OutgoingMessage>& message : connection.outgoing.kept.all()) {
    if (!message->error && !message->hasArrived()) {
      sendFrames(connection, *message);
    }
  }
  connection.outgoing.sentAgainBelow = connection.outgoing.kept.nextNumber();
}

void Outbox::acknowledge(Connection& connection, bool mustSendAgain) {
  if (connection.state() == Connection::State::kResuming || connection.isJoining() || !canLeave(connection)) {
    return;
  }
  connection.incoming.unacknowledgedBytes = 0;
  sendControl(connection.peer(), wire::Kind::kReceived, 0, encodeReceived(connection.incoming.received, mustSendAgain));
}

// --------------------------------------------------------------------------------------------------- local errors

std::string Outbox::describeStranded() const {
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    const Messages& held = connection->outgoing.held;
    const auto stranded = std::ranges::find(held, OutgoingMessage::Wait::kRetry, &OutgoingMessage::waitsFor);
    if (stranded != held.end()) {
      return "cannot send to " + connection->peer().describe() +
          " at present, and keeps trying: " + (*stranded)->error.message();
    }
  }
  return "messages that could not be sent at first have now been sent";
}

void Outbox::retryStranded() {
  assertHoldsWorkerLock();
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    retryStranded(*connection);
  }
}

void Outbox::retryStranded(Connection& connection) {
  for (std::unique_ptr<OutgoingMessage>& message : connection.outgoing.held) {
    if (message->waitsFor == OutgoingMessage::Wait::kRetry) {
      message->waitsFor = OutgoingMessage::Wait::kNothing;
      message->error = {};
      --stranded_;
    }
  }
  sendHeld(connection);
}

size_t Outbox::underWay() const {
  size_t sum = 0;
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    if (connection->isJoining()) {
      continue; // a worker that leaves waits for all that is under way, and a peer may never admit it
    }
    const Connection::State state = connection->state();
    const bool counts = state != Connection::State::kClosed && connection->endpoint().has_value();
    sum += counts ? connection->outgoing.underWay : 0;
    if (state == Connection::State::kResuming) {
      sum += connection->outgoing.kept.all().size();
      for (const auto& waiting : connection->outgoing.waiting) {
        sum += waiting.size();
      }
    }
    sum += connection->outgoing.held.size();
  }
  return sum;
}

void Outbox::onAdmitted(Peer& peer) {
  assertHoldsWorkerLock();
  peer.hasAdmitted.store(true);
  if (peer.connection != nullptr) {
    peer.connection->outgoing.join = {};
    sendHeld(*peer.connection);
  }
}

void Outbox::abandon(Peer& peer) {
  assertHoldsWorkerLock();
  if (peer.connection == nullptr) {
    return;
  }
  // The connection is closed already, since the peer is gone. So connect() fails whatever is started from here on.
  sendHeld(*peer.connection); // messages that wait for admission fail
  for (Connection::Path& path : peer.connection->paths) {
    if (!isClosed_ && path.endpoint.has_value()) {
      transport_.abandon(*path.endpoint);
      path.endpoint.reset(); // a late goodbye makes another endpoint
    }
  }
  failWaiting(*peer.connection);
  endKept(*peer.connection);
}

void Outbox::close() {
  assertHoldsWorkerLock();
  isClosed_ = true; // first, so that everything below fails
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    sendHeld(*connection);
  }
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    failWaiting(*connection);
    endKept(*connection);
  }
}

} // namespace torch_ucx_rpc
