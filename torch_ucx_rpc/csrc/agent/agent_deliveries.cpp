// What making progress brings about, handed out without the worker lock: to calls, to the threads, to whom it concerns.

#include "agent/agent.h"
#include "agent/message_types.h"
#include "agent/tensor_codec.h"
#include "base/trace.h"
#include "wire/body.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>

#include <cstring>
#include <optional>
#include <utility>

namespace torch_ucx_rpc {

namespace {

bool isQuickRequest(const IncomingMessage& message) {
  return message.header.kind == wire::Kind::kRequest &&
      isQuick(static_cast<torch::distributed::rpc::MessageType>(wire::messageTypeOf(message.body())));
}

} // namespace

void UcxRpcAgent::dispatch(Deliveries deliveries, const std::optional<Driver>& driver) {
  std::vector<Answer> answers;
  std::vector<IncomingMessage> inOrder;
  std::vector<IncomingMessage> quick;
  // A thread that had to be woken for it would compete with this one for the processor. But torch's handling of one request, in
  // which a visitor may be, does not expect another on the same thread.
  const bool takesQuick = driver && !AgentThreads::isInTask();
  for (IncomingMessage& message : deliveries.messages) {
    if (message.header.kind != wire::Kind::kResponse) {
      (takesQuick && isQuickRequest(message) ? quick : inOrder).push_back(std::move(message));
    } else if (std::optional<Answer> answer = onResponse(std::move(message), driver)) {
      answers.push_back(std::move(*answer));
    }
  }
  for (std::unique_ptr<OutgoingMessage>& message : deliveries.sent) {
    onSent(message, driver && driver->role == Role::kVisitor);
  }
  for (Deliveries::Rejection& rejection : deliveries.rejections) {
    onRejected(std::move(rejection));
  }
  for (Deliveries::Join& join : deliveries.joins) {
    onJoin(std::move(join));
  }
  // Requests may wait for what earlier ones bring about, and must not fill the threads before those.
  if (!inOrder.empty() || !deliveries.failures.empty()) {
    deliveries.turn.end([this, messages = std::move(inOrder), failures = std::move(deliveries.failures)]() mutable {
      for (IncomingMessage& message : messages) {
        onMessage(std::move(message));
      }
      for (Deliveries::Failure& failure : failures) {
        onPeerGone(*failure.peer, Peer::State::kFailed, failure.peer->lost(std::move(failure.error)));
      }
    });
  }
  deliveries.turn.end(); // what follows runs user code
  for (IncomingMessage& message : quick) {
    noteRequest(message);
    serve(std::move(message));
  }
  if (!deliveries.warning.empty()) {
    LOG(WARNING) << "torch_ucx_rpc: " << deliveries.warning;
  }
  for (Answer& answer : answers) {
    complete(std::move(answer.call), std::move(answer.message));
  }
}

std::optional<UcxRpcAgent::Answer> UcxRpcAgent::onResponse(
    IncomingMessage message, const std::optional<Driver>& driver) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  const uint64_t id = message.header.callId;
  const trace::Span span("receive answer", message.call(), trace::Arrow::kAnswerArrives);
  Answer answer;
  if (self == nullptr || !calls_.isOpen(id, *message.from) || !calls_.take(id, answer.call)) {
    return std::nullopt; // a late answer, or one of a worker that was not asked; its buffers are recycled here
  }
  answer.message = std::move(message);
  if (driver && (id == driver->call || isAnswerQuick(answer.call.type))) {
    return answer;
  }
  threads_->addCompletion([self, answer = std::move(answer)]() mutable {
    self->complete(std::move(answer.call), std::move(answer.message));
    self->wakeVisitor();
  });
  return std::nullopt;
}

void UcxRpcAgent::onMessage(IncomingMessage message) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    return; // being destroyed
  }
  if (message.header.kind != wire::Kind::kRequest) {
    onControl(message);
    return;
  }
  noteRequest(message);
  Peer& from = *message.from;
  const uint64_t callId = message.header.callId;
  threads_->addRequest(
      [self, message = std::move(message)]() mutable { self->serve(std::move(message)); },
      [self, &from, callId] { self->respondWithError(from, callId, self->describeNesting()); });
}

void UcxRpcAgent::noteRequest(const IncomingMessage& message) {
  const trace::Span span("receive request", message.call(), trace::Arrow::kRequestArrives);
  message.from->requestsOpen.fetch_add(1);
  message.from->callsReceived.fetch_add(1, std::memory_order_relaxed);
}

void UcxRpcAgent::onControl(const IncomingMessage& message) {
  Peer& from = *message.from;
  const std::span<const std::byte> body = message.body();
  switch (message.header.kind) {
    case wire::Kind::kGoodbye:
      onPeerGone(from, Peer::State::kLeft, {ErrorCode::kShutDown, from.describe() + " has shut down its RPC agent"});
      return;
    case wire::Kind::kLeave:
      onLeave(from);
      return;
    case wire::Kind::kAcknowledge:
      from.hasAcknowledged.store(true);
      progress_->submit([this, &from] { outbox_->onAdmitted(from); });
      return;
    case wire::Kind::kBarrierArrive: {
      wire::BarrierArrive arrive{};
      if (body.size() == sizeof(arrive)) {
        std::memcpy(&arrive, body.data(), sizeof(arrive));
        barrier_.onArrive(from, message.header.callId, arrive.value);
      }
      return;
    }
    case wire::Kind::kBarrierRelease: {
      wire::BarrierRelease release{};
      if (body.size() >= sizeof(release)) {
        std::memcpy(&release, body.data(), sizeof(release));
        const auto* sentence = reinterpret_cast<const char*>(body.data()) + sizeof(release);
        Error error;
        if (release.failed != 0) {
          error = {ErrorCode::kPeerFailed, std::string(sentence, body.size() - sizeof(release))};
        }
        barrier_.onRelease(message.header.callId, {release.sum, std::move(error)});
      }
      return;
    }
    default:
      return; // requests, responses and cancellations do not come here
  }
}

Error UcxRpcAgent::decode(IncomingMessage incoming, Streams& streams, DecodedMessage& decoded) {
  if (!incoming.isContentGenuine()) {
    inbox_->countRefused();
    return {
        ErrorCode::kProtocol,
        "a message of " + incoming.from->describe() + " has arrived with another content than it was sealed with"};
  }
  try {
    const Devices& devices = getDevices();
    streams = poolStreams(devices);
    incoming.before.blockStreams(streams);
    const c10::MultiStreamGuard guard(streams);
    return decodeMessage(std::move(incoming), devices, decoded);
  } catch (const std::exception& failure) {
    return deviceFailed(failure);
  }
}

void UcxRpcAgent::onSent(std::unique_ptr<OutgoingMessage>& message, bool isVisitor) {
  if (message->error && message->header.kind == wire::Kind::kRequest) {
    CallTable::Call call;
    if (calls_.take(message->header.callId, call)) {
      const Error gone = message->to->whyGone();
      failCallLater(
          std::move(call),
          gone ? gone.message() : "could not send to " + message->to->describe() + ": " + message->error.message());
    }
  } else if (message->error.code() == ErrorCode::kDeviceFailed && message->header.kind == wire::Kind::kResponse) {
    message->to->requestsOpen.fetch_add(1);
    respondWithError(*message->to, message->header.callId, message->error.message());
  } else if (message->error.code() == ErrorCode::kOutOfFiles && message->header.kind == wire::Kind::kResponse) {
    LOG(WARNING) << "torch_ucx_rpc: could not answer " << message->to->describe()
                 << ", whose call will end with its timeout: " << message->error.message();
  } else if (message->error && message->header.kind != wire::Kind::kResponse) {
    // Nobody waits for this message itself, but somebody may for what it asks for: an acknowledgment, the end of a barrier. A
    // worker that ended just before we would have connected shows in no other way if its process goes on.
    onPeerGone(*message->to, Peer::State::kFailed, message->to->lost(message->error));
  }
  const bool mayRunUserCode = message->lender != nullptr && message->lender->mayRunUserCode();
  if (!mayRunUserCode || isVisitor) {
    return; // it is destroyed with the deliveries, when others' turn has come
  }
  // Not by who is sending: torch does that with locks of its own taken, which who has the GIL may be waiting for.
  if (AgentThreads::isInTask()) {
    AgentThreads::runAfterTask([message = std::move(message)] {});
  } else {
    destroyLater(std::move(message));
  }
}

void UcxRpcAgent::destroyLater(std::unique_ptr<OutgoingMessage> message) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    sentMessages_.push_back(std::move(message));
    if (std::exchange(isDestroyingSent_, true)) {
      return;
    }
  }
  // One thread for all: while a function of Python's holds the GIL, it waits for that.
  threads_->addCompletion([self] {
    std::vector<std::unique_ptr<OutgoingMessage>> taken;
    do {
      taken.clear();
      const std::lock_guard lock(self->mutex_);
      taken.swap(self->sentMessages_);
      self->isDestroyingSent_ = !taken.empty();
    } while (!taken.empty());
  });
}

void UcxRpcAgent::onRejected(Deliveries::Rejection rejection) {
  if (rejection.header.kind == wire::Kind::kRequest) {
    if (rejection.from->isThere()) {
      rejection.from->requestsOpen.fetch_add(1);
      respondWithError(*rejection.from, rejection.header.callId, couldNotReceive(rejection.error));
    }
    return;
  }
  CallTable::Call call;
  if (calls_.isOpen(rejection.header.callId, *rejection.from) && calls_.take(rejection.header.callId, call)) {
    failCallLater(
        std::move(call),
        "could not receive the answer of " + rejection.from->describe() + ": " + rejection.error.message());
  }
}

} // namespace torch_ucx_rpc
