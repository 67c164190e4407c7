// The part of Outbox for messages that outlast their endpoint (docs/development/resumption.md).

#include "messaging/control_frames.h"
#include "messaging/outbox.h"
#include "runtime/worker_mutex.h"

#include <memory>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

void Outbox::endKept(Connection& connection) {
  KeptMessages& kept = connection.outgoing.kept;
  const bool isOver = !canLeave(connection);
  for (std::unique_ptr<OutgoingMessage>& message : kept.takeEnded(isOver)) {
    freeRoom(connection, *message);
    if (message->error && !isOver && connection.mayResume()) {
      for (OutgoingMessage* pong : kept.replace(*message)) {
        pong->sealFrames(connection.sealer);
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
      sendFrames(connection, *message);
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
