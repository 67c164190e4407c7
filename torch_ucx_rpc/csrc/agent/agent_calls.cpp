// Calls of this worker, from send() to the completion of their futures, and those who wait for them.

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/device_copy.h"
#include "agent/message_types.h"
#include "agent/tensor_codec.h"
#include "base/time.h"
#include "base/trace.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// How often a thread that waits for another caller's visit looks up.
constexpr auto kLookUp = std::chrono::milliseconds(100);

// The call that this thread has sent last. Who waits next waits for that: rpc_sync and to_here() send and wait. Not told by the
// future waited for, which torch has derived from the call's.
thread_local std::optional<uint64_t> lastCall;

} // namespace

c10::intrusive_ptr<JitFuture> UcxRpcAgent::send(
    const WorkerInfo& to, c10::intrusive_ptr<Message> message, float rpcTimeoutSeconds, const DeviceMap& deviceMap) {
  checkProcess();
  TORCH_CHECK(message->isRequest(), "UcxRpcAgent::send() is for requests; this message is of type ", message->type());
  TORCH_CHECK(
      rpcAgentRunning_.load() && !isClosed_.load(),
      "RPC is not running on worker '",
      workerInfo_.name_,
      "': it has been shut down, so nothing can be sent to worker '",
      to.name_,
      "'");
  HandlingScope::releaseInnermost(); // a handler that calls out may wait for long: the window must not wait with it
  const rpc::MessageType type = message->type();
  const auto timeout = rpcTimeoutSeconds == rpc::kUnsetRpcTimeout ? getRpcTimeout() : toMilliseconds(rpcTimeoutSeconds);
  c10::intrusive_ptr<JitFuture> future =
      request(directory_.at(to.id_), std::move(message), timeout, deviceMap.empty() ? getDeviceMap(to) : deviceMap);
  if (isFetch(type) && !AgentThreads::isLeader()) {
    // RRef.to_here() sends this and waits, within one function of torch. Waiting here instead, Ctrl-C works, and the caller
    // drives its own call. Nobody else sends these messages.
    wait(*future);
  }
  return future;
}

c10::intrusive_ptr<JitFuture> UcxRpcAgent::request(
    Peer& peer, c10::intrusive_ptr<Message> message, std::chrono::milliseconds timeout, const DeviceMap& deviceMap) {
  trace::Span span("send request", {}, trace::Arrow::kRequestLeaves);
  const rpc::MessageType type = message->type();
  std::unique_ptr<OutgoingMessage> mail = encodeMessage(std::move(message), peer, deviceMap, *transport_);

  CallTable::Call call;
  call.future = c10::make_intrusive<JitFuture>(at::AnyClassType::get(), getDevices());
  call.to = &peer;
  call.type = type;
  call.sentAt = CallTable::Clock::now();
  call.timeout = timeout;
  if (timeout.count() != 0) { // 0: no limit
    call.deadline = call.sentAt + timeout;
  }
  call.nesting = AgentThreads::nest();
  mail->waitsForRoom = mail->isBodyEager() && !call.eager.take(peer, mail->body.size());
  c10::intrusive_ptr<JitFuture> future = call.future;
  const CallTable::Clock::time_point deadline = call.deadline;
  bool isEarliest = false;
  const uint64_t id = calls_.open(std::move(call), isEarliest);
  span.belongsTo({session_, id});
  lastCall = id;
  if (isEarliest) {
    timer_.dueBy(deadline);
  }
  peer.callsSent.fetch_add(1, std::memory_order_relaxed);

  // Asked after the call is in the table: whoever marks the peer gone afterwards finds it there.
  CallTable::Call refused;
  if (peer.state() != Peer::State::kPresent && calls_.take(id, refused)) {
    endCallToGone(std::move(refused));
  } else if (isClosed_.load() && calls_.take(id, refused)) {
    failCall(refused, "RPC has been shut down on this worker");
  } else {
    post(peer, wire::Kind::kRequest, id, std::move(mail));
  }
  return future;
}

void UcxRpcAgent::post(Peer& to, wire::Kind kind, uint64_t callId, std::unique_ptr<OutgoingMessage> message) {
  message->to = &to;
  message->address(kind, session_, workerInfo_.id_, to.member().session, callId);
  if (to.member().session == session_) {
    deliverToSelf(std::move(message));
    return;
  }
  if (message->stagedBytes != 0) {
    noteStaged(*message);
  }
  message->sealContent();
  progress_->submit([this, message = std::move(message)]() mutable { outbox_->send(std::move(message)); });
}

void UcxRpcAgent::noteStaged(const OutgoingMessage& message) {
  if (stagedBytes_.fetch_add(message.stagedBytes, std::memory_order_relaxed) == 0) {
    LOG(WARNING)
        << "torch_ucx_rpc: tensors for " << message.to->describe()
        << " are in device memory that UCX cannot share with another process (of cudaMallocAsync, or of torch's "
           "expandable_segments with UCX before 1.22): they are copied through the host's memory, which is slower. "
           "Unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF. This is said once.";
  }
}

void UcxRpcAgent::postControl(Peer& to, wire::Kind kind, uint64_t callId, Bytes body) {
  auto message = std::make_unique<OutgoingMessage>();
  message->body = std::move(body);
  post(to, kind, callId, std::move(message));
}

// Calls to oneself skip the transport (UCX's own loopback has no wake-up), not the rules: what arrives is a copy.
void UcxRpcAgent::deliverToSelf(std::unique_ptr<OutgoingMessage> message) {
  IncomingMessage arrived;
  arrived.from = message->to;
  arrived.header = message->header;
  arrived.eagerBody = std::move(message->body);
  arrived.spans.reserve(message->spans.size());
  try {
    Devices devices;
    for (const OutgoingMessage::Span& span : message->spans) {
      c10::DataPtr copy;
      if (span.from.is_cpu() && span.to.is_cpu()) {
        copy = HostPool::instance().allocate(span.bytes.size());
        std::memcpy(copy.get(), span.bytes.data(), span.bytes.size());
      } else {
        copy = copyBytes(span.bytes.data(), span.bytes.size(), span.from, span.to);
      }
      if (!span.to.is_cpu()) {
        devices.push_back(span.to);
      }
      arrived.spans.push_back({std::move(copy), span.bytes.size()});
    }
    arrived.before = DeviceWork(currentStreams(devices));
  } catch (const c10::Error& failure) {
    onRejected({message->to, message->header, deviceFailed(failure)});
    return;
  } catch (const std::bad_alloc&) {
    onRejected({message->to, message->header, outOfMemoryFor(message->totalBytes())});
    return;
  }
  if (arrived.header.kind == wire::Kind::kResponse) {
    onResponse(std::move(arrived));
  } else {
    onMessage(std::move(arrived));
  }
}

void UcxRpcAgent::complete(CallTable::Call call, IncomingMessage incoming) {
  const trace::Span span("complete call", incoming.call());
  const Peer& from = *incoming.from;
  Streams streams;
  DecodedMessage decoded;
  // With the message goes its share of the window: the future's callbacks may wait for other answers.
  if (Error error = decode(std::move(incoming), streams, decoded)) {
    failCall(call, "the answer of " + from.describe() + " is unreadable: " + error.message());
    return;
  }
  if (decoded.message->type() == rpc::MessageType::EXCEPTION) {
    const std::vector<char>& payload = decoded.message->payload();
    failCall(call, std::string(payload.begin(), payload.end()));
    return;
  }
  call.to->latencies.add(CallTable::Clock::now() - call.sentAt);
  if (runsPython(call.type)) {
    AgentThreads::runHooks(); // for callbacks
  }
  // Not Message::getStorages(), which throws for undefined tensors and for the compressed sparse layouts.
  const c10::MultiStreamGuard guard(streams); // who gets the value waits for these
  runCallbacks([&] { call.future->markCompleted(std::move(decoded.message), std::move(decoded.deviceStorages)); });
}

void UcxRpcAgent::failCall(const CallTable::Call& call, const std::string& what) {
  call.to->callsFailed.fetch_add(1, std::memory_order_relaxed);
  runCallbacks([&] { call.future->setError(asException(what)); });
}

void UcxRpcAgent::endCallToGone(CallTable::Call call) {
  const std::string what = call.to->whyGone().message();
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  c10::intrusive_ptr<Message> answer = answerForTheGone(call.type);
  if (answer == nullptr || self == nullptr) {
    failCallLater(std::move(call), what);
    return;
  }
  threads_->addCompletion([self, call = std::move(call), answer = std::move(answer)] {
    runCallbacks([&] { call.future->markCompleted(answer, answer->getStorages()); });
  });
}

void UcxRpcAgent::failCallLater(CallTable::Call call, std::string what) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    failCall(call, what);
    return;
  }
  threads_->addCompletion([self, call = std::move(call), what = std::move(what)] {
    self->failCall(call, what);
    self->wakeVisitor();
  });
}

void UcxRpcAgent::wakeVisitor() {
  if (isVisited_.load()) {
    progress_->wake();
  }
}

// Drives progress on the calling thread until the future is complete, or a signal comes in. False if another caller does.
bool UcxRpcAgent::visit(const JitFuture& future) {
  const std::unique_lock visitor(visitorMutex_, std::try_to_lock);
  if (!visitor.owns_lock()) {
    return false;
  }
  const Driver driver{Role::kVisitor, lastCall};
  const auto isOver = [&] { return future.completed() || isClosed_.load(); };
  isVisited_.store(true);
  while (!isOver()) {
    Deliveries deliveries = progress_->visit(isOver);
    if (deliveries.empty()) {
      break;
    }
    dispatch(std::move(deliveries), driver);
  }
  isVisited_.store(false);
  progress_->leave();
  return true;
}

void UcxRpcAgent::wait(JitFuture& future) {
  checkProcess();
  while (!future.completed() && !isClosed_.load()) {
    if (!visit(future)) {
      await(future); // somebody else visits
    } else if (!future.completed()) {
      whileWaiting_();
    }
  }
}

void UcxRpcAgent::await(JitFuture& future) {
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool isComplete = false;
  };
  if (future.completed()) {
    return;
  }
  const auto completion = std::make_shared<Completion>();
  constexpr bool kNeedsValue = false;
  future.addCallback(
      [completion](JitFuture& /*future*/) {
        const std::lock_guard lock(completion->mutex);
        completion->isComplete = true;
        completion->changed.notify_all();
      },
      kNeedsValue);
  std::unique_lock lock(completion->mutex);
  const auto isOver = [&] { return completion->isComplete || isClosed_.load(); };
  while (!completion->changed.wait_for(lock, kLookUp, isOver)) {
    // Without the lock: this takes the GIL, and who completes the future may have that.
    lock.unlock();
    whileWaiting_();
    lock.lock();
  }
}

} // namespace torch_ucx_rpc
