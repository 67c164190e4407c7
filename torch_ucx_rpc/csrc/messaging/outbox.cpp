#include "messaging/outbox.h"

#include "runtime/worker_mutex.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace torch_ucx_rpc {

Error Outbox::connect(const OutgoingMessage& message) {
  if (isClosed_) {
    return {ErrorCode::kShutDown, "RPC has been shut down on this worker"};
  }
  Peer& peer = *message.to;
  // A goodbye tells a worker that it is gone for this one, which may have come to be so before the goodbye's turn.
  if (!peer.isThere() && message.header.kind != wire::Kind::kGoodbye) {
    return peer.whyGone();
  }
  if (peer.endpoint.has_value()) {
    return {};
  }
  // At the first message, not at the start: a worker of a large job calls few others.
  EndpointId endpoint = 0;
  const std::string& address = peer.member().address;
  if (Error error = peer.isOverNetwork.load() ? transport_.connectOverNetwork(address, endpoint)
                                              : transport_.connect(address, endpoint)) {
    return error;
  }
  peer.endpoint = endpoint;
  peers_[endpoint] = &peer;
  return {};
}

Error Outbox::moveToNetwork(Peer& peer) {
  assertHoldsWorkerLock();
  if (isClosed_ || !peer.isThere() || peer.isOverNetwork.load()) {
    return {};
  }
  EndpointId endpoint = 0;
  if (Error error = transport_.connectOverNetwork(peer.member().address, endpoint)) {
    return error;
  }
  peer.isOverNetwork.store(true);
  peers_[endpoint] = &peer;
  if (const std::optional<EndpointId> former = std::exchange(peer.endpoint, endpoint)) {
    retiredEndpoints_.emplace(&peer, *former); // not closed: UCX would free what the peer may still read
  }
  for (const wire::Kind kind : {wire::Kind::kRequest, wire::Kind::kResponse}) {
    retireQueue({&peer, kind, true});
    retireQueue({&peer, kind, false});
  }
  return {};
}

void Outbox::retireQueue(const QueueKey& key) {
  // Messages that wait take the network. Those under way over shared memory may never end, and would keep the room that
  // they have in the queue.
  if (auto retired = queues_.extract(key)) {
    Queue& queue = queues_[key];
    queue.waiting.swap(retired.mapped().waiting);
    unblocked_.push_back(&queue);
    retiredQueues_.insert(std::move(retired)); // its messages under way point to it
  }
}

void Outbox::send(std::unique_ptr<OutgoingMessage> message) {
  assertHoldsWorkerLock();
  // A goodbye does not wait for admission: this worker wants none any more.
  if (message->header.kind == wire::Kind::kJoin) {
    unadmitted_.try_emplace(message->to);
  } else if (const auto entry = unadmitted_.find(message->to);
             entry != unadmitted_.end() && message->header.kind != wire::Kind::kGoodbye) {
    entry->second.push_back(std::move(message));
    return;
  }
  // Not counted before: a worker that leaves waits for all that is under way, and a peer may never admit it.
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
    return message.pendingWork.isDone();
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
  Queue* queue = nullptr;
  // Control frames do not wait, and messages that are about to fail take no room: without a queue they are not counted.
  if (isQueued(*message) && canLeave(*message) && !message->error) {
    queue = &queueOf(*message);
    // Even if there is room, a message does not pass those that wait.
    if (!queue->waiting.empty() || !queue->hasRoomFor(*message, share_)) {
      queue->waiting.emplace(message->header.callId, std::move(message));
      return;
    }
  }
  start(std::move(message), queue);
}

void Outbox::startDeferred() {
  assertHoldsWorkerLock();
  sendReady();
  sendCancels();
  // A message that completes at once unblocks its queue again. A queue may be named twice: its room is looked at anew.
  while (!unblocked_.empty()) {
    for (Queue* queue : std::exchange(unblocked_, {})) {
      while (!queue->waiting.empty() && queue->hasRoomFor(*queue->waiting.begin()->second, share_)) {
        startFirst(*queue);
      }
    }
  }
}

bool Outbox::cancel(Peer& to, uint64_t callId) {
  assertHoldsWorkerLock();
  const auto takeFrom = [&](std::vector<std::unique_ptr<OutgoingMessage>>& messages) {
    std::unique_ptr<OutgoingMessage> taken;
    const auto found = std::ranges::find_if(messages, [&](const std::unique_ptr<OutgoingMessage>& message) {
      return message->to == &to && message->header.kind == wire::Kind::kRequest && message->header.callId == callId;
    });
    if (found != messages.end()) {
      taken = std::move(*found);
      messages.erase(found);
    }
    return taken;
  };
  std::unique_ptr<OutgoingMessage> given = takeFrom(unready_);
  // The caller of cancel() does not know how the body travels.
  for (const bool isEager : {true, false}) {
    const auto queue = queues_.find({&to, wire::Kind::kRequest, isEager});
    if (given == nullptr && queue != queues_.end()) {
      if (auto queued = queue->second.waiting.extract(callId)) {
        given = std::move(queued.mapped());
      }
    }
  }
  if (given != nullptr) {
    --to.messagesUnderWay;
  } else if (const auto waiting = unadmitted_.find(&to); waiting != unadmitted_.end()) {
    given = takeFrom(waiting->second); // not counted yet
  }
  if (given == nullptr) {
    return false; // the transport has it, or has had it: only the callee can drop it now
  }
  given->error = callGivenUp();
  // Not destroyed here: its tensors may run user code when they die, which the worker lock forbids.
  events_.addSent(std::move(given));
  return true;
}

void Outbox::startFirst(Queue& queue) {
  start(std::move(queue.waiting.extract(queue.waiting.begin()).mapped()), &queue);
}

void Outbox::start(std::unique_ptr<OutgoingMessage> owned, Queue* queue) {
  OutgoingMessage* message = owned.release(); // finish() owns it again
  if (queue != nullptr) {
    queue->account(*message, true);
  }
  message->unfinished = 1 + message->pieces.size(); // before the first send, which may complete at once
  if (Error error = message->error ? message->error : connect(*message)) {
    finish(message, queue, message->unfinished, std::move(error));
    return;
  }
  // Frames are numbered here, in the order in which they leave.
  message->sealFrames();
  const EndpointId endpoint = *message->to->endpoint;
  message->to->isMet.store(true, std::memory_order_relaxed);
  message->to->bytesSent.fetch_add(message->totalBytes(), std::memory_order_relaxed);
  for (size_t index = 0; index < message->pieces.size(); ++index) {
    const OutgoingMessage::Piece& piece = message->pieces[index];
    transport_.send(
        endpoint,
        piece.header,
        piece.bytes,
        SendMode::kRendezvous,
        [this, message, queue](Error error) {
          message->to->silence.heardSinceCheck |= !error; // the peer has fetched it
          finish(message, queue, 1, std::move(error));
        },
        piece.memory);
    // The message is still there: its body, which has not been sent, counts as unfinished.
    if (message->error) {
      finish(message, queue, message->pieces.size() - index, {}); // the later pieces and the body do not leave
      return;
    }
    message->hasLeftInPart = true;
  }
  // This send may finish the message at once, and destroy it. Nothing of it is touched afterwards.
  // The end of an eager send is no sign of life: UCX may have copied the bytes, and the peer not read them.
  const SendMode mode = message->isBodyEager() ? SendMode::kEager : SendMode::kRendezvous;
  transport_.send(endpoint, message->header, message->body, mode, [this, message, queue](Error error) {
    finish(message, queue, 1, std::move(error));
  });
}

// What an error does. "Local" errors (isLocal() in base/error.h) are this process's, and say nothing about the peer.
// All others count as the peer's.
//
//   message        error        what follows, and where
//   request        any          its call fails (CallClient::onRequestNotSent()); this alone ends no peer
//   answer         a device's   an answer with the error goes instead (RequestServer::onAnswerNotSent())
//   answer         local        it strands here, and is sent again until it has left
//   answer         the peer's   a refusal goes instead (RequestServer::onAnswerNotSent())
//   control frame  local        it strands here, and is sent again until it has left
//   control frame  the peer's   the peer is lost (PeerMonitor::onControlNotSent())
//   an endpoint    local        the next message makes another endpoint (Inbox::onEndpointFailed())
//   an endpoint    the peer's   the peer is lost (PeerMonitor::onFailure())
//
// A message that has left in part never strands: at its first error withdraw() has the receiver told. Once the peer is
// gone or the outbox is closed nothing strands, and no frame tells the receiver.
void Outbox::finish(OutgoingMessage* message, Queue* queue, size_t parts, Error error) {
  if (error && !message->error) {
    message->error = std::move(error);
    if (message->hasLeftInPart && canLeave(*message)) {
      withdraw(*message);
    }
  }
  // The other parts may be under way for long after an error. UCX uses their memory until it has called back.
  message->unfinished -= parts;
  if (message->unfinished != 0) {
    return;
  }
  if (queue != nullptr) {
    queue->account(*message, false);
    // A transport callback must not send, so startDeferred() fills the room.
    if (!queue->waiting.empty()) {
      unblocked_.push_back(queue);
    }
  }
  --message->to->messagesUnderWay;
  std::unique_ptr<OutgoingMessage> owned(message);
  // A message that has left in part is not sent again: its receiver has some of the parts. A device that has failed
  // will fail again.
  if (isLocal(owned->error.code()) && owned->error.code() != ErrorCode::kDeviceFailed && !owned->hasLeftInPart &&
      canLeave(*owned) && owned->header.kind != wire::Kind::kRequest) {
    stranded_.push_back(std::move(owned));
    return;
  }
  events_.addSent(std::move(owned));
}

void Outbox::withdraw(const OutgoingMessage& message) {
  if (message.header.kind == wire::Kind::kRequest) {
    withdrawn_.emplace_back(message.to, message.header); // a transport callback must not send
  } else {
    events_.addCutAnswer(*message.to, message.header.callId, message.error);
  }
}

void Outbox::sendCancels() {
  for (const auto& [to, header] : std::exchange(withdrawn_, {})) {
    auto cancel = std::make_unique<OutgoingMessage>();
    cancel->to = to;
    cancel->address(wire::Kind::kCancel, header.sourceSession, header.sourceRank, header.targetSession, header.callId);
    if (canLeave(*cancel)) {
      send(std::move(cancel));
    }
  }
}

std::string Outbox::describeStranded() const {
  if (stranded_.empty()) {
    return "messages could not be sent at first, and have been";
  }
  const OutgoingMessage& first = *stranded_.front();
  return "cannot send to " + first.to->describe() + " at present, and tries on: " + first.error.message();
}

void Outbox::retryStranded() {
  assertHoldsWorkerLock();
  for (std::unique_ptr<OutgoingMessage>& message : std::exchange(stranded_, {})) {
    message->error = {};
    send(std::move(message));
  }
}

size_t Outbox::underWay() const {
  size_t sum = stranded_.size(); // finish() has counted them down, and they are to leave all the same
  for (const auto& [endpoint, peer] : peers_) {
    sum += peer->isThere() && peer->endpoint == endpoint ? peer->messagesUnderWay : 0; // a peer may have had several
  }
  return sum;
}

Peer* Outbox::peerOf(EndpointId endpoint) const {
  const auto entry = peers_.find(endpoint);
  return entry != peers_.end() ? entry->second : nullptr;
}

void Outbox::onAdmitted(Peer& peer) {
  assertHoldsWorkerLock();
  if (auto waiting = unadmitted_.extract(&peer)) {
    for (std::unique_ptr<OutgoingMessage>& message : waiting.mapped()) {
      send(std::move(message));
    }
  }
}

void Outbox::abandon(Peer& peer) {
  assertHoldsWorkerLock();
  // The state says already that the peer is gone. So connect() fails whatever is started from here on.
  onAdmitted(peer); // messages that wait for admission fail; startDeferred() fails those that wait for a device
  if (!isClosed_ && peer.endpoint.has_value()) {
    transport_.abandon(*peer.endpoint);
    const auto [first, last] = retiredEndpoints_.equal_range(&peer);
    std::for_each(first, last, [this](const auto& retired) { transport_.abandon(retired.second); });
  }
  retryStranded(); // and fail, since the peer is gone
  for (auto& [key, queue] : queues_) {
    while (std::get<const Peer*>(key) == &peer && !queue.waiting.empty()) {
      startFirst(queue); // and fail
    }
  }
}

void Outbox::close() {
  assertHoldsWorkerLock();
  isClosed_ = true; // first, so that everything below fails
  while (!unadmitted_.empty()) {
    onAdmitted(*unadmitted_.begin()->first);
  }
  retryStranded(); // and fail
  sendReady(); // and fail
  for (auto& [key, queue] : queues_) {
    while (!queue.waiting.empty()) {
      startFirst(queue); // and fail
    }
  }
}

} // namespace torch_ucx_rpc
