#include "agent/outbox.h"

#include <utility>

namespace torch_ucx_rpc {

Error Outbox::connect(Peer& peer) {
  if (isClosed_) {
    return {ErrorCode::kShutDown, "RPC has been shut down on this worker"};
  }
  if (!peer.isThere()) {
    return peer.whyGone();
  }
  if (peer.endpoint.has_value()) {
    return {};
  }
  EndpointId endpoint = 0;
  if (Error error = transport_.connect(peer.member().address, endpoint)) {
    return error;
  }
  peer.endpoint = endpoint;
  peers_[endpoint] = &peer;
  return {};
}

void Outbox::send(std::unique_ptr<OutgoingMessage> owned) {
  if (owned->header.kind == wire::Kind::kJoin) {
    waiting_.try_emplace(owned->to);
  } else if (const auto entry = waiting_.find(owned->to);
             entry != waiting_.end() && owned->header.kind != wire::Kind::kGoodbye) {
    entry->second.push_back(std::move(owned));
    return;
  }
  OutgoingMessage* message = owned.release(); // ours again in finish()
  ++underWay_;
  message->unfinished = 1 + message->spans.size();
  if (Error error = connect(*message->to)) {
    finish(message, message->unfinished, std::move(error));
    return;
  }
  message->sealFrames();
  const EndpointId endpoint = *message->to->endpoint;
  message->to->bytesSent.fetch_add(message->totalBytes(), std::memory_order_relaxed);
  // The last part may finish the message at once: nothing of it is touched after its last send.
  const size_t spans = message->spans.size();
  for (size_t index = 0; index < spans; ++index) {
    const OutgoingMessage::Span& span = message->spans[index];
    transport_.send(endpoint, span.header, span.bytes, SendMode::kRendezvous, [this, message](Error error) {
      message->to->silence.isBroken |= !error; // the peer has fetched it
      finish(message, 1, std::move(error));
    });
  }
  const SendMode mode = message->isBodyEager() ? SendMode::kEager : SendMode::kRendezvous;
  transport_.send(endpoint, message->header, message->body, mode, [this, message](Error error) {
    finish(message, 1, std::move(error));
  });
}

void Outbox::finish(OutgoingMessage* message, size_t parts, Error error) {
  if (error && !message->error) {
    message->error = std::move(error);
  }
  message->unfinished -= parts;
  if (message->unfinished == 0) {
    --underWay_;
    deliveries_.sent.emplace_back(message);
  }
}

Peer* Outbox::peerOf(EndpointId endpoint) const {
  const auto entry = peers_.find(endpoint);
  return entry != peers_.end() ? entry->second : nullptr;
}

void Outbox::onAdmitted(Peer& peer) {
  if (auto waiting = waiting_.extract(&peer)) {
    for (std::unique_ptr<OutgoingMessage>& message : waiting.mapped()) {
      send(std::move(message));
    }
  }
}

void Outbox::close() {
  isClosed_ = true;
  while (!waiting_.empty()) {
    onAdmitted(*waiting_.begin()->first);
  }
}

void Outbox::abandon(Peer& peer) {
  onAdmitted(peer); // nobody admits any more: what has waited fails
  if (!isClosed_ && peer.endpoint.has_value()) {
    transport_.abandon(*peer.endpoint);
  }
}

} // namespace torch_ucx_rpc
