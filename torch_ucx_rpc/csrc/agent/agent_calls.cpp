// What happens to a call, from send() to the completion of its future; the rest of UcxRpcAgent is in agent.cpp.

#include "agent/agent.h"
#include "agent/gradient_devices.h"
#include "agent/tensor_codec.h"
#include "base/time.h"
#include "base/trace.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_resp.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// How often a thread that waits for another caller's visit looks up.
constexpr auto kLookUp = std::chrono::milliseconds(100);

constexpr auto kRepairPeriod = std::chrono::milliseconds(20);

// The call that this thread has sent last. Who waits next waits for that: rpc_sync and to_here() send and wait. Not told by the
// future waited for, which torch has derived from the call's.
thread_local std::optional<uint64_t> lastCall;

// The share of the window that belongs to the request this thread is running.
thread_local Admission* runningAdmission = nullptr;

class AdmissionScope {
 public:
  explicit AdmissionScope(Admission& admission) : outer_(std::exchange(runningAdmission, &admission)) {}
  ~AdmissionScope() {
    runningAdmission = outer_;
  }
  AdmissionScope(const AdmissionScope&) = delete;
  AdmissionScope& operator=(const AdmissionScope&) = delete;

 private:
  Admission* const outer_;
};

std::exception_ptr asException(const std::string& what) {
  return std::make_exception_ptr(std::runtime_error(what));
}

// torch's own words, which programs look for, and whom we called.
std::string timeoutText(std::chrono::milliseconds timeout, const Peer& to) {
  std::string text = rpc::kRpcTimeoutErrorStr;
  text.replace(text.find("{}"), 2, std::to_string(timeout.count()));
  return text + "; called " + to.describe();
}

// Completes a future, and so runs its callbacks. Torch's own may throw: that of an RRef does, which its owner died over. Whoever
// uses that RRef is told; here is nobody to tell, and an exception would end the process.
template <typename Complete>
void runCallbacks(const Complete& complete) {
  try {
    complete();
  } catch (const std::exception& error) {
    VLOG(1) << "torch_ucx_rpc: a callback of a call has failed: " << error.what();
  }
}

// torch sends these until they are answered, and ends the process over one that never is: its thread for that lets exceptions of
// callbacks pass. A worker that is gone need not know what they say; null for any other.
c10::intrusive_ptr<Message> answerForTheGone(rpc::MessageType request) {
  switch (request) {
    case rpc::MessageType::RREF_FORK_REQUEST:
    case rpc::MessageType::RREF_CHILD_ACCEPT:
    case rpc::MessageType::RREF_USER_DELETE:
      return rpc::RRefAck().toMessage();
    case rpc::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
      return torch::distributed::autograd::CleanupAutogradContextResp().toMessage();
    default:
      return nullptr;
  }
}

// What TorchScript, operators and torch's own bookkeeping do goes on beside a function of Python's that holds the GIL.
bool runsPython(rpc::MessageType request) {
  switch (request) {
    case rpc::MessageType::PYTHON_CALL:
    case rpc::MessageType::PYTHON_REMOTE_CALL:
    case rpc::MessageType::PYTHON_RREF_FETCH_CALL:
    case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
    case rpc::MessageType::RUN_WITH_PROFILING_REQ:
      return true;
    default:
      return false;
  }
}

// A request is its sender's call, an answer its receiver's.
trace::CallId callOf(const IncomingMessage& message) {
  const wire::Header& header = message.header;
  const bool isRequest = header.kind == wire::Kind::kRequest;
  return {isRequest ? header.sourceSession : header.targetSession, header.callId};
}

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
  if (runningAdmission != nullptr) {
    runningAdmission->release(); // a handler that calls out may wait for long: the window must not wait with it
  }
  const rpc::MessageType type = message->type();
  const bool isFetch =
      type == rpc::MessageType::PYTHON_RREF_FETCH_CALL || type == rpc::MessageType::SCRIPT_RREF_FETCH_CALL;
  const auto timeout = rpcTimeoutSeconds == rpc::kUnsetRpcTimeout ? getRpcTimeout() : toMilliseconds(rpcTimeoutSeconds);
  c10::intrusive_ptr<JitFuture> future =
      request(directory_.at(to.id_), std::move(message), timeout, deviceMap.empty() ? getDeviceMap(to) : deviceMap);
  if (isFetch && !AgentThreads::isLeader()) {
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
  std::unique_ptr<OutgoingMessage> mail = encodeMessage(std::move(message), peer, deviceMap);

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
  message->sealContent();
  progress_->submit([this, message = std::move(message)]() mutable { outbox_->send(std::move(message)); });
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
  }
  if (arrived.header.kind == wire::Kind::kResponse) {
    onResponse(std::move(arrived));
  } else {
    onMessage(std::move(arrived));
  }
}

void UcxRpcAgent::onSent(std::unique_ptr<OutgoingMessage> message, bool isVisitor) {
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
  if (message->lender == nullptr || !message->lender->mayRunUserCode()) {
    return;
  }
  // Not by who is sending: torch does that with locks of its own taken, which who has the GIL may be waiting for.
  if (isVisitor) {
    return;
  }
  if (!AgentThreads::isInTask()) {
    destroyLater(std::move(message));
    return;
  }
  AgentThreads::runAfterTask([message = std::move(message)] {});
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

// --------------------------------------------------------------------------------------------------- incoming

void UcxRpcAgent::dispatch(Deliveries deliveries, std::optional<uint64_t> visitorsCall) {
  std::optional<Answer> visitorsAnswer;
  std::vector<IncomingMessage> inOrder;
  for (IncomingMessage& message : deliveries.messages) {
    if (message.header.kind != wire::Kind::kResponse) {
      inOrder.push_back(std::move(message));
    } else if (std::optional<Answer> answer = onResponse(std::move(message), visitorsCall)) {
      visitorsAnswer = std::move(answer);
    }
  }
  for (std::unique_ptr<OutgoingMessage>& message : deliveries.sent) {
    onSent(std::move(message), visitorsCall.has_value());
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
  if (!deliveries.warning.empty()) {
    LOG(WARNING) << "torch_ucx_rpc: " << deliveries.warning;
  }
  if (visitorsAnswer) {
    complete(std::move(visitorsAnswer->call), std::move(visitorsAnswer->message));
  }
}

std::optional<UcxRpcAgent::Answer> UcxRpcAgent::onResponse(
    IncomingMessage message, std::optional<uint64_t> visitorsCall) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  const uint64_t id = message.header.callId;
  const trace::Span span("receive answer", callOf(message), trace::Arrow::kAnswerArrives);
  Answer answer;
  if (self == nullptr || !calls_.isOpen(id, *message.from) || !calls_.take(id, answer.call)) {
    return std::nullopt; // a late answer, or one of a worker that was not asked; its buffers are recycled here
  }
  answer.message = std::move(message);
  if (id == visitorsCall) {
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
  const trace::Span span("receive request", callOf(message), trace::Arrow::kRequestArrives);
  Peer& from = *message.from;
  const uint64_t callId = message.header.callId;
  from.requestsOpen.fetch_add(1);
  from.callsReceived.fetch_add(1, std::memory_order_relaxed);
  threads_->addRequest(
      [self, message = std::move(message)]() mutable { self->serve(std::move(message)); },
      [self, &from, callId] { self->respondWithError(from, callId, self->describeNesting()); });
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

void UcxRpcAgent::serve(IncomingMessage incoming) {
  Peer& from = *incoming.from;
  if (from.state() == Peer::State::kFailed) { // it died while this queued: nobody waits for the answer
    from.requestsOpen.fetch_sub(1);
    return;
  }
  const uint64_t callId = incoming.header.callId;
  Admission admission = std::move(incoming.admission);
  admission.beginHandling();
  const trace::CallId traced{from.member().session, callId};
  Streams streams;
  DecodedMessage decoded;
  {
    const trace::Span span("decode request", traced);
    if (Error error = decode(std::move(incoming), streams, decoded)) {
      respondWithError(from, callId, couldNotReceive(error));
      return;
    }
  }
  c10::intrusive_ptr<Message> request = std::move(decoded.message);
  rrefHolders_.note(from.info().id_, *request);
  if (runsPython(request->type())) {
    AgentThreads::runHooks();
  }
  c10::intrusive_ptr<JitFuture> response;
  try {
    const trace::Span span("run handler", traced);
    if (request->type() == rpc::MessageType::RUN_WITH_PROFILING_REQ) {
      // torch's legacy profiler records on a thread only the first time it is enabled there (torch 2.13; TensorPipe with its 16
      // threads returns the remote events of the first 16 calls). A thread of its own always records.
      runOnOwnThread([&] { response = handle(request, streams, admission); });
    } else {
      response = handle(request, streams, admission);
    }
  } catch (const std::exception& error) {
    respondWithError(from, callId, error.what());
    return;
  }
  request.reset(); // the handler has what it wants to keep
  admission.release();
  if (response->completed()) {
    const c10::MultiStreamGuard guard(streams);
    if (!streams.empty()) {
      response->wait(); // the streams, not this thread, wait for its value
    }
    respond(from, callId, *response);
    return;
  }
  asyncRequests_.fetch_add(1);
  response->addCallback([self = shared_from_this(), &from, callId](JitFuture& completed) {
    self->asyncRequests_.fetch_sub(1);
    self->respond(from, callId, completed);
  });
}

c10::intrusive_ptr<JitFuture> UcxRpcAgent::handle(
    c10::intrusive_ptr<Message> request, const Streams& streams, Admission& admission) const {
  const AdmissionScope scope(admission);
  const c10::MultiStreamGuard guard(streams);
  if (hasDeviceMaps_.load()) {
    placeGradients(request);
  }
  return (*cb_)(*request, streams);
}

void UcxRpcAgent::runOnOwnThread(const std::function<void()>& work) const {
  std::exception_ptr failure;
  std::thread([&] {
    if (threadHooks_.onStart) {
      threadHooks_.onStart();
    }
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    if (threadHooks_.onExit) {
      threadHooks_.onExit();
    }
  }).join();
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void UcxRpcAgent::respond(Peer& to, uint64_t callId, const JitFuture& response) {
  if (response.hasError()) {
    respondWithError(to, callId, response.tryRetrieveErrorMessage());
    return;
  }
  const trace::Span span("send answer", {to.member().session, callId}, trace::Arrow::kAnswerLeaves);
  std::unique_ptr<OutgoingMessage> mail;
  try {
    mail = encodeMessage(response.constValue().toCustomClass<Message>(), to, replyDeviceMap(to.info()));
  } catch (const std::exception& error) {
    respondWithError(to, callId, error.what());
    return;
  }
  post(to, wire::Kind::kResponse, callId, std::move(mail));
  to.requestsOpen.fetch_sub(1); // after the answer is on its way: one who leaves waits for it
}

void UcxRpcAgent::respondWithError(Peer& to, uint64_t callId, const std::string& what) {
  post(
      to,
      wire::Kind::kResponse,
      callId,
      encodeMessage(rpc::createExceptionResponse(what, static_cast<int64_t>(callId)), to, {}));
  to.requestsOpen.fetch_sub(1);
}

std::string UcxRpcAgent::couldNotReceive(const Error& error) const {
  return "worker '" + workerInfo_.name_ + "' could not receive this call: " + error.message();
}

std::string UcxRpcAgent::describeNesting() const {
  return "worker '" + workerInfo_.name_ + "' has no thread left for this call: all " +
      std::to_string(threads_->counts().runningRequests) +
      " calls that it is running wait for calls that they have made themselves, and max_worker_threads allows no more; nest "
      "calls less deeply, raise max_worker_threads, or have functions return futures (rpc.functions.async_execution)";
}

void UcxRpcAgent::complete(CallTable::Call call, IncomingMessage incoming) {
  const trace::Span span("complete call", callOf(incoming));
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
  threads_->addCompletion([call = std::move(call), answer = std::move(answer)] {
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

// ------------------------------------------------------------------------------------------------------- time

Timer::Clock::time_point UcxRpcAgent::onTimer(Timer::Clock::time_point now) {
  Timer::Clock::time_point next = Timer::Clock::time_point::max();
  std::vector<std::pair<Peer*, uint64_t>> expiredIds;
  for (CallTable::Expired& expired : calls_.takeExpired(now, next)) {
    callsTimedOut_.fetch_add(1, std::memory_order_relaxed);
    Peer& to = *expired.call.to;
    if (to.member().session != session_) {
      expiredIds.emplace_back(&to, expired.id);
    }
    const std::string what = rpc::makeRPCError(timeoutText(expired.call.timeout, to), rpc::RPCErrorType::TIMEOUT);
    failCallLater(std::move(expired.call), what);
    isRepairWanted_.store(true); // it is also how a worker looks that hears nothing
  }
  if (isRepairWanted_.load() || isRepairing_.load()) {
    progress_->submit([this] { repairWithWorkerLock(); });
    next = std::min(next, now + kRepairPeriod);
  }
  if (!expiredIds.empty()) {
    // What the callee has not taken in yet it need not; its handler, once running, is not interrupted. After the failures: this may
    // make progress for others.
    progress_->submit([this, ids = std::move(expiredIds)] {
      for (const auto& [to, id] : ids) {
        if (!outbox_->cancel(*to, id)) {
          sendNowWithWorkerLock(*to, wire::Kind::kCancel, id);
        }
      }
    });
  }

  if (isDeviceTimerSet_.exchange(false)) {
    progress_->submit([] {}); // settles, and sets it again if there is still something to wait for
  }

  next = std::min(next, threads_->check(now));

  if (hasHeartbeats_.load()) {
    if (now >= heartbeatDue_) {
      heartbeatDue_ = now + heartbeat_.period();
      progress_->submit([this] { checkHeartbeats(); });
    }
    next = std::min(next, heartbeatDue_);
  }

  if (window_->waitingMessages.load() == 0) {
    isStallTimerSet_.store(false);
    stalledSince_ = {};
    return next;
  }
  progress_->submit([] {}); // settles: what is received slowly must not keep the rest waiting
  const uint64_t releases = window_->releases();
  const auto patience =
      window_->receivingMessages.load() == 0 ? ReceiveWindow::kPatience : ReceiveWindow::kPatienceWhileReceiving;
  if (stalledSince_ == Timer::Clock::time_point{} || releases != stalledReleases_ ||
      threads_->counts().waitingRequests != 0) {
    stalledReleases_ = releases;
    stalledSince_ = now;
  } else if (now - stalledSince_ >= patience) {
    progress_->submit([this] {
      if (!isClosed_.load()) { // the transport may be too
        inbox_->admitStalled();
      }
    });
    stalledSince_ = now;
  }
  return std::min(next, now + ReceiveWindow::kPatience / 2);
}

// Drives progress on the calling thread until the future is complete, or a signal comes in. False if another caller does.
bool UcxRpcAgent::visit(const JitFuture& future) {
  const std::unique_lock visitor(visitorMutex_, std::try_to_lock);
  if (!visitor.owns_lock()) {
    return false;
  }
  const std::optional<uint64_t> call = lastCall;
  const auto isOver = [&] { return future.completed() || isClosed_.load(); };
  isVisited_.store(true);
  while (!isOver()) {
    Deliveries deliveries = progress_->visit(isOver);
    if (deliveries.empty()) {
      break;
    }
    dispatch(std::move(deliveries), call);
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
