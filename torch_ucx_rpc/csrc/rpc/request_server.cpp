#include "rpc/request_server.h"

#include "base/trace.h"
#include "rpc/decoding.h"
#include "tensors/gradient_devices.h"
#include "torch_glue/failed_rref.h"
#include "torch_glue/message_types.h"
#include "wire/body.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// torch asks each tensor of an answer for its storage (Message::getStorages()), before the encoder can refuse one that
// has none. This replaces torch's text, which names neither the tensor's message nor the cure.
std::string explained(std::string_view what, const Peer& to) {
  constexpr std::string_view kNoStorage = "Cannot access storage of ";
  if (!what.starts_with(kNoStorage)) {
    return std::string(what);
  }
  what.remove_prefix(kNoStorage.size());
  return "the UCX RPC backend cannot send a tensor in this answer to " + to.describe() +
      ": it has no memory of its own (" + std::string(what.substr(0, what.find('\n'))) +
      "); convert it first, e.g. tensor.to_dense().";
}

} // namespace

RequestServer::RequestServer(
    const AgentParts& parts, const RequestCallback& callback, RRefHolders& rrefHolders, const DeviceMaps& deviceMaps)
    : AgentParts(parts), callback_(callback), rrefHolders_(rrefHolders), deviceMaps_(deviceMaps) {}

// --------------------------------------------------------------------------------------------------- taking in

bool RequestServer::mayRunOnDriver(const IncomingMessage& request) const {
  // The body is not checked yet. A malformed one is refused by the thread that decodes it.
  return torch_ucx_rpc::mayRunOnDriver(static_cast<rpc::MessageType>(wire::messageTypeOf(request.body())));
}

OpenRequest RequestServer::take(const IncomingMessage& request) {
  const trace::Span span("receive request", request.call(), trace::Arrow::kRequestArrives);
  request.from->callsReceived.fetch_add(1, std::memory_order_relaxed);
  return {*request.from, request.header.callId};
}

void RequestServer::onRequest(IncomingMessage request) {
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    return; // being destroyed
  }
  Peer& from = *request.from;
  const uint64_t callId = request.header.callId;
  OpenRequest open = take(request);
  executor_.addRequest(
      [this, hold, open = std::move(open), request = std::move(request), arrivedAt = Clock::now()]() mutable {
        if (hasExpired(request, arrivedAt)) {
          // A server that ran abandoned requests would collapse under timeouts and retries.
          expired_.fetch_add(1, std::memory_order_relaxed);
          return;
        }
        serve(std::move(open), std::move(request));
      },
      [this, hold, &from, callId] { refuse(from, callId, describeNesting()); });
}

bool RequestServer::hasExpired(const IncomingMessage& request, Clock::time_point arrivedAt) {
  const std::chrono::milliseconds deadline(request.header.deadlineMs);
  return deadline.count() != 0 && Clock::now() - arrivedAt >= deadline;
}

void RequestServer::runOnDriver(IncomingMessage request) {
  OpenRequest open = take(request);
  serve(std::move(open), std::move(request));
}

void RequestServer::onRequestRejected(Peer& from, uint64_t callId, const Error& why) {
  if (from.isThere()) {
    refuse(from, callId, couldNotReceive(why));
  }
}

// ------------------------------------------------------------------------------------------------------ serving

void RequestServer::serve(OpenRequest open, IncomingMessage incoming) {
  Peer& from = open.from();
  if (from.state() == Peer::State::kFailed) {
    return; // the caller died while the request was queued; after a goodbye requests still run
  }
  const trace::CallId traced{from.member().session, open.callId()};
  Admission admission = std::move(incoming.admission);
  admission.beginHandling();
  Streams streams;
  c10::intrusive_ptr<Message> request;
  {
    const trace::Span span("decode request", traced);
    DecodedMessage decoded;
    if (const Error error = decodeArrived(messenger_, deviceMaps_, std::move(incoming), streams, decoded)) {
      refuse(from, open.callId(), couldNotReceive(error));
      return;
    }
    request = std::move(decoded.message);
  }
  if (runsPython(request->type())) {
    Executor::runHooks();
  }
  RRefHolders::Noted noted;
  c10::intrusive_ptr<JitFuture> response;
  try {
    noted = rrefHolders_.note(from.member().rank, *request);
    const trace::Span span("run handler", traced);
    if (noted.after != nullptr) {
      response = deleteAfter(*noted.after, request);
    } else if (request->type() == rpc::MessageType::RUN_WITH_PROFILING_REQ) {
      // torch's legacy profiler records on a thread only the first time it is enabled there (torch 2.13). So TensorPipe
      // with its 16 threads returns the remote events of the first 16 calls only. A new thread always records.
      executor_.runOnOwnThread([&] { response = handle(request, streams, admission); });
    } else {
      response = handle(request, streams, admission);
    }
  } catch (const std::exception& error) {
    answerWithError(from, open.callId(), error.what());
    return;
  }
  request.reset(); // the handler has kept what it needs, and its tensors need not live until the answer
  // A handler that has returned does not need more memory. Its tensors may live on without a share of the window.
  admission.release();
  if (response->completed()) {
    const c10::MultiStreamGuard guard(streams); // handle() has left these streams, and the answer follows their order
    if (!streams.empty()) {
      response->wait(); // the streams, not this thread, wait for its value
    }
    answer(open, *response);
    return;
  }
  // A handler may never complete its future, which then keeps its callback for good. So the callback owns neither the
  // agent nor the request, but looks both up. The request is noted first, since the callback may run at once.
  const uint64_t id = addAsync(std::move(open), std::move(noted.making));
  response->addCallback([this, id, agent = std::weak_ptr<void>(lifetime_.hold())](JitFuture& completed) {
    if (const std::shared_ptr<void> hold = agent.lock()) {
      const AsyncRequest request = takeAsync(id);
      answer(request.open, completed);
    }
  });
}

uint64_t RequestServer::addAsync(OpenRequest open, std::shared_ptr<void> making) {
  const std::lock_guard lock(asyncMutex_);
  async_.emplace(++lastAsync_, AsyncRequest{std::move(open), std::move(making)});
  return lastAsync_;
}

RequestServer::AsyncRequest RequestServer::takeAsync(uint64_t id) {
  const std::lock_guard lock(asyncMutex_);
  return std::move(async_.extract(id).mapped());
}

size_t RequestServer::openAsync() const {
  const std::lock_guard lock(asyncMutex_);
  return async_.size();
}

c10::intrusive_ptr<JitFuture> RequestServer::handle(
    c10::intrusive_ptr<Message> request, const Streams& streams, Admission& admission) const {
  const HandlingScope scope(admission);
  const c10::MultiStreamGuard guard(streams);
  if (isFailedRRef(*request)) {
    return makeFailedRRef(*request);
  }
  if (deviceMaps_.hasAny()) {
    placeGradients(request);
  }
  return callback_(*request, streams);
}

c10::intrusive_ptr<JitFuture> RequestServer::deleteAfter(JitFuture& value, c10::intrusive_ptr<Message> deletion) const {
  const std::weak_ptr<void> agent = lifetime_.hold();
  value.addCallback([this, deletion = std::move(deletion), agent](JitFuture& /*value*/) {
    if (const std::shared_ptr<void> hold = agent.lock()) {
      callback_(*deletion, {});
    }
  });
  auto answer = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  answer->markCompleted(rpc::RRefAck().toMessage());
  return answer;
}

// ---------------------------------------------------------------------------------------------------- answering

void RequestServer::answer(const OpenRequest& open, const JitFuture& response) {
  Peer& to = open.from();
  if (response.hasError()) {
    answerWithError(to, open.callId(), explained(response.tryRetrieveErrorMessage(), to));
    return;
  }
  const trace::Span span("send answer", {to.member().session, open.callId()}, trace::Arrow::kAnswerLeaves);
  c10::intrusive_ptr<Message> answer = response.constValue().toCustomClass<Message>();
  if (answer->type() == rpc::MessageType::EXCEPTION) {
    const std::vector<char>& payload = answer->payload();
    answerWithError(to, open.callId(), explained({payload.data(), payload.size()}, to));
    return;
  }
  std::unique_ptr<OutgoingMessage> message;
  try {
    message =
        encodeMessage(std::move(answer), to, deviceMaps_.forAnswersTo(to.member().name), messenger_.transportTo(to));
  } catch (const c10::Error& error) {
    answerWithError(to, open.callId(), error.what_without_backtrace());
    return;
  } catch (const std::exception& error) {
    answerWithError(to, open.callId(), error.what());
    return;
  }
  messenger_.post(to, wire::Kind::kResponse, open.callId(), std::move(message));
}

void RequestServer::answerWithError(Peer& to, uint64_t callId, const std::string& what) {
  messenger_.post(
      to,
      wire::Kind::kResponse,
      callId,
      encodeMessage(
          rpc::createExceptionResponse(what, static_cast<int64_t>(callId)), to, {}, messenger_.transportTo(to)));
}

void RequestServer::refuse(Peer& to, uint64_t callId, const Error& why) {
  if (to.member().session == self_.session) {
    answerWithError(to, callId, why.message()); // control frames never go to oneself
    return;
  }
  // A control frame does not queue behind answers, nor does it need room at the caller.
  messenger_.postControl(to, refused(callId, why));
}

void RequestServer::onAnswerNotSent(Peer& to, uint64_t callId, const Error& why, bool hasLeftInPart) {
  if (why.code() == ErrorCode::kDeviceFailed && !hasLeftInPart) { // caused by the answer's tensors; an error has none
    answerWithError(to, callId, why.message());
  } else if (to.isThere() && !lifetime_.isClosed()) {
    // The caller may have some parts of the answer, and would wait for the others.
    refuse(
        to, callId, {ErrorCode::kInternal, "worker '" + self_.name + "' could not send its answer: " + why.message()});
  }
}

Error RequestServer::couldNotReceive(const Error& error) const {
  return {error.code(), "worker '" + self_.name + "' could not receive this call: " + error.message()};
}

Error RequestServer::describeNesting() const {
  return {
      ErrorCode::kOutOfThreads,
      "worker '" + self_.name + "' has no thread left for this call: all " +
          std::to_string(executor_.counts().runningRequests) +
          " calls that it is running wait for calls that they have made themselves, and max_worker_threads allows no "
          "more; nest calls less deeply, raise max_worker_threads, or have functions return futures "
          "(rpc.functions.async_execution)"};
}

} // namespace torch_ucx_rpc
