#include "messaging/outbox.h"

#include <algorithm>
#include <exception>
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

void Outbox::send(std::unique_ptr<OutgoingMessage> message) {
  if (message->header.kind == wire::Kind::kJoin) {
    unadmitted_.try_emplace(message->to);
  } else if (const auto entry = unadmitted_.find(message->to);
             entry != unadmitted_.end() && message->header.kind != wire::Kind::kGoodbye) {
    entry->second.push_back(std::move(message));
    return;
  }
  ++message->to->messagesUnderWay;
  if (isReady(*message)) {
    enqueue(std::move(message));
  } else {
    unready_.push_back(std::move(message));
  }
}

bool Outbox::isReady(OutgoingMessage& message) const {
  if (!canLeave(message)) {
    return true;
  }
  try {
    return message.before.isDone();
  } catch (const std::exception& failure) {
    message.error = deviceFailed(failure);
    return true;
  }
}

void Outbox::sendReady() {
  std::erase_if(unready_, [this](std::unique_ptr<OutgoingMessage>& message) {
    const bool isNow = isReady(*message);
    if (isNow) {
      enqueue(std::move(message));
    }
    return isNow;
  });
}

void Outbox::enqueue(std::unique_ptr<OutgoingMessage> message) {
  if (message->rendezvousParts() != 0 && canLeave(*message) && !message->error) { // else it fails at once
    Queue& queue = queueOf(*message);
    if (!queue.waiting.empty() || !queue.hasRoomFor(*message)) {
      queue.waiting.emplace(message->header.callId, std::move(message));
      return;
    }
  }
  start(std::move(message));
}

void Outbox::startDeferred() {
  sendReady();
  while (!moved_.empty()) {
    for (Queue* queue : std::exchange(moved_, {})) {
      while (!queue->waiting.empty() && queue->hasRoomFor(*queue->waiting.begin()->second)) {
        startFirst(*queue);
      }
    }
  }
}

bool Outbox::cancel(Peer& to, uint64_t callId) {
  std::unique_ptr<OutgoingMessage> given;
  const auto unready =
      std::find_if(unready_.begin(), unready_.end(), [&](const std::unique_ptr<OutgoingMessage>& message) {
        return message->to == &to && message->header.kind == wire::Kind::kRequest && message->header.callId == callId;
      });
  if (unready != unready_.end()) {
    given = std::move(*unready);
    unready_.erase(unready);
  } else if (const auto queue = queues_.find({&to, wire::Kind::kRequest}); queue != queues_.end()) {
    if (auto queued = queue->second.waiting.extract(callId)) {
      given = std::move(queued.mapped());
    }
  }
  if (given == nullptr) {
    return false;
  }
  given->error = callGivenUp();
  --to.messagesUnderWay;
  events_.addSent(std::move(given));
  return true;
}

void Outbox::startFirst(Queue& queue) {
  start(std::move(queue.waiting.extract(queue.waiting.begin()).mapped()));
}

void Outbox::start(std::unique_ptr<OutgoingMessage> owned) {
  OutgoingMessage* message = owned.release(); // ours again in finish()
  if (const size_t parts = message->rendezvousParts(); parts != 0) {
    queueOf(*message).rendezvous += parts;
  }
  message->unfinished = 1 + message->pieces.size();
  if (Error error = message->error ? message->error : connect(*message->to)) {
    finish(message, message->unfinished, std::move(error));
    return;
  }
  message->sealFrames();
  const EndpointId endpoint = *message->to->endpoint;
  message->to->bytesSent.fetch_add(message->totalBytes(), std::memory_order_relaxed);
  // The last part may finish the message at once: nothing of it is touched after its last send.
  const size_t pieces = message->pieces.size();
  for (size_t index = 0; index < pieces; ++index) {
    const OutgoingMessage::Piece& piece = message->pieces[index];
    transport_.send(
        endpoint,
        piece.header,
        piece.bytes,
        SendMode::kRendezvous,
        [this, message](Error error) {
          message->to->silence.heardSinceCheck |= !error; // the peer has fetched it
          finish(message, 1, std::move(error));
        },
        piece.memory);
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
  if (message->unfinished != 0) {
    return;
  }
  if (const size_t rendezvous = message->rendezvousParts(); rendezvous != 0) {
    Queue& queue = queueOf(*message);
    queue.rendezvous -= rendezvous;
    moved_.push_back(&queue);
  }
  --message->to->messagesUnderWay;
  events_.addSent(std::unique_ptr<OutgoingMessage>(message));
}

size_t Outbox::underWay() const {
  size_t sum = 0;
  for (const auto& [endpoint, peer] : peers_) {
    sum += peer->isThere() ? peer->messagesUnderWay : 0;
  }
  return sum;
}

Peer* Outbox::peerOf(EndpointId endpoint) const {
  const auto entry = peers_.find(endpoint);
  return entry != peers_.end() ? entry->second : nullptr;
}

void Outbox::onAdmitted(Peer& peer) {
  if (auto waiting = unadmitted_.extract(&peer)) {
    for (std::unique_ptr<OutgoingMessage>& message : waiting.mapped()) {
      send(std::move(message));
    }
  }
}

void Outbox::abandon(Peer& peer) {
  onAdmitted(peer); // nobody admits any more: what has waited fails; startDeferred() ends what waits for a device
  if (!isClosed_ && peer.endpoint.has_value()) {
    transport_.abandon(*peer.endpoint);
  }
  for (auto& [key, queue] : queues_) {
    while (key.first == &peer && !queue.waiting.empty()) {
      startFirst(queue); // and fail
    }
  }
}

void Outbox::close() {
  isClosed_ = true;
  while (!unadmitted_.empty()) {
    onAdmitted(*unadmitted_.begin()->first);
  }
  sendReady(); // and fail
  for (auto& [key, queue] : queues_) {
    while (!queue.waiting.empty()) {
      startFirst(queue); // and fail
    }
  }
}

} // namespace torch_ucx_rpc
