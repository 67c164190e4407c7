#include "agent/outbox.h"

#include <exception>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

Error shutDown() {
  return {ErrorCode::kShutDown, "RPC has been shut down on this worker"};
}

} // namespace

Error Outbox::connect(Peer& peer) {
  if (isClosed_) {
    return shutDown();
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

template <typename Condition>
void Outbox::failUnready(Condition condition, const Error& error) {
  std::erase_if(unready_, [&](OutgoingMessage* message) {
    const bool isMeant = condition(*message);
    if (isMeant) {
      finish(message, message->unfinished, error);
    }
    return isMeant;
  });
}

void Outbox::send(std::unique_ptr<OutgoingMessage> owned) {
  OutgoingMessage* message = owned.release(); // ours again in finish()
  ++underWay_;
  message->unfinished = 1 + message->spans.size();
  if (message->header.kind == wire::Kind::kCancel) { // what has not been sent need not be
    failUnready(
        [message](const OutgoingMessage& other) {
          return other.to == message->to && other.header.kind == wire::Kind::kRequest &&
              other.header.callId == message->header.callId;
        },
        {ErrorCode::kCanceled, "the call has timed out before its tensors were ready"});
  }
  if (!sendIfReady(message)) {
    unready_.push_back(message);
  }
}

void Outbox::settle() {
  std::erase_if(unready_, [this](OutgoingMessage* message) { return sendIfReady(message); });
}

bool Outbox::sendIfReady(OutgoingMessage* message) {
  try {
    if (!isClosed_ && !message->before.isDone()) {
      return false;
    }
  } catch (const std::exception& failure) { // of the device, whatever it was at
    finish(
        message, message->unfinished, {ErrorCode::kDeviceFailed, std::string("the device fails: ") + failure.what()});
    return true;
  }
  sendReady(message);
  return true;
}

void Outbox::sendReady(OutgoingMessage* message) {
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
    transport_.send(
        endpoint,
        span.header,
        span.bytes,
        SendMode::kRendezvous,
        [this, message](Error error) {
          message->to->silence.isBroken |= !error; // the peer has fetched it
          finish(message, 1, std::move(error));
        },
        span.from.is_cpu() ? Memory::kHost : Memory::kDevice);
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

void Outbox::close() {
  isClosed_ = true;
  failUnready([](const OutgoingMessage&) { return true; }, shutDown());
}

void Outbox::abandon(Peer& peer) {
  failUnready([&peer](const OutgoingMessage& message) { return message.to == &peer; }, peer.whyGone());
  if (!isClosed_ && peer.endpoint.has_value()) {
    transport_.abandon(*peer.endpoint);
  }
}

} // namespace torch_ucx_rpc
