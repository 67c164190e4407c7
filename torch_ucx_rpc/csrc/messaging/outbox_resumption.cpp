// The part of Outbox for messages that outlast their endpoint (docs/development/resumption.md).

#include "messaging/control_frames.h"
#include "messaging/outbox.h"
#include "runtime/worker_mutex.h"

#include <memory>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Another endpoint does not help against these.
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

} // namespace

// Sends the frames of a kept message that the peer does not have.
void Outbox::sendKept(Connection& connection, OutgoingMessage& message) {
  const EndpointId endpoint = *connection.endpoint();
  size_t left = 0;
  message.forEachFrame([&](const wire::Header& /*header*/, bool hasArrived) { left += hasArrived ? 0 : 1; });
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
      finishKept(message, endpoint, 1, std::move(error));
    };
    transport_.send(endpoint, piece.header, piece.bytes, SendMode::kRendezvous, onDone, piece.memory);
    if (message.error) {
      finishKept(message, endpoint, left, {}); // the later pieces and the body do not leave
      return;
    }
    message.hasLeftInPart = true;
  }
  if (!message.hasBodyArrived) {
    const SendMode mode = message.isBodyEager() ? SendMode::kEager : SendMode::kRendezvous;
    transport_.send(endpoint, message.header, message.body, mode, [this, &message, endpoint](Error error) {
      finishKept(message, endpoint, 1, std::move(error));
    });
  }
}

// An operation of a kept message has ended. It does not destroy the message, which the caller may be sending: endKept()
// does, in the next round.
void Outbox::finishKept(OutgoingMessage& message, EndpointId endpoint, size_t parts, Error error) {
  Connection& connection = *message.to->connection;
  const bool isOver = !canLeave(connection);
  const bool hasFailed = static_cast<bool>(error);
  if (hasFailed && !message.error) {
    if (isOver || isFinal(error) || !connection.mayResume()) {
      message.error = std::move(error);
      if (message.hasLeftInPart && !isOver) {
        withdraw(connection, message);
      }
    } else if (connection.endpoint() == endpoint) {
      connection.outgoing.isBroken = true;
      connections_.makeReady(connection);
    }
  }
  message.unfinished -= parts;
  if (message.unfinished != 0) {
    return;
  }
  if (!hasFailed) {
    freeRoom(connection, message);
  }
  if (isOver || message.error || message.hasArrived()) {
    connection.outgoing.kept.lookAtAll();
    if (isClosed_) {
      endKept(connection); // there is no further round; the transport is being closed, so nothing is being sent
    } else {
      connections_.makeReady(connection);
    }
  }
}

// The transport is done with a message. The room of its parts by rendezvous is free then. Memory of an eager body is
// free once the peer has it.
void Outbox::freeRoom(Connection& connection, OutgoingMessage& message) {
  Connection::Outgoing& outgoing = connection.outgoing;
  if (std::exchange(message.isUnderWay, false)) {
    --outgoing.underWay;
  }
  const bool isEager = message.rendezvousParts() == 0;
  if (message.takesRoom && (!isEager || message.hasArrived() || message.error)) {
    message.takesRoom = false;
    const size_t queue = Connection::queueOf(message);
    connection.path().loads[queue].account(message, false);
    if (!outgoing.waiting[queue].empty()) {
      connections_.makeReady(connection);
    }
  }
}

void Outbox::endKept(Connection& connection) {
  KeptMessages& kept = connection.outgoing.kept;
  const bool isOver = !canLeave(connection);
  for (std::unique_ptr<OutgoingMessage>& message : kept.takeEnded(isOver)) {
    freeRoom(connection, *message);
    if (message->error && !isOver && connection.mayResume()) {
      for (OutgoingMessage* pong : kept.replace(*message)) {
        pong->sealFrames(connection.sealer);
        ++connection.outgoing.underWay;
        if (connection.endpoint().has_value()) {
          sendKept(connection, *pong);
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
  // Not at once: if its process has ended, the peer is lost before this.
  if (const std::string why = std::exchange(connection.whyBroken, {}); !why.empty()) {
    events_.addWarning(
        "the connection to " + peer.describe() + " has failed (" + why +
        "), and nothing says that its process has ended: another connection takes its place, messages that have not "
        "arrived are sent again, and calls go on");
  }
  EndpointId endpoint = 0;
  const std::string& address = peer.member().address;
  if (peer.isOverNetwork.load() ? transport_.connectOverNetwork(address, endpoint)
                                : transport_.connect(address, endpoint)) {
    connection.roundsToResume = 1;
    return;
  }
  connection.setEndpoint(endpoint);
  sendAgain(connection);
  acknowledge(connection); // the peer need not send arrived messages again
  connections_.makeReady(connection); // messages that wait leave
}

void Outbox::sendAgain(Connection& connection) {
  for (const std::unique_ptr<OutgoingMessage>& message : connection.outgoing.kept.all()) {
    if (!message->error && !message->hasArrived()) {
      sendKept(connection, *message);
    }
  }
}

void Outbox::acknowledge(Connection& connection, bool mustSendAgain) {
  if (connection.state() == Connection::State::kResuming || !canLeave(connection)) {
    return;
  }
  auto message = std::make_unique<OutgoingMessage>();
  Peer& to = connection.peer();
  message->to = &to;
  message->address(wire::Kind::kReceived, self_.session, self_.rank, to.member().session, 0);
  message->body = encodeReceived(connection.incoming.received, mustSendAgain);
  connection.incoming.unacknowledgedBytes = 0;
  send(std::move(message));
}

} // namespace torch_ucx_rpc
