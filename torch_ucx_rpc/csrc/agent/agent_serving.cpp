// Calls of other workers, from the thread that takes one up to its answer.

#include "agent/agent.h"
#include "agent/gradient_devices.h"
#include "agent/message_types.h"
#include "agent/tensor_codec.h"
#include "base/trace.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <exception>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

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
  c10::intrusive_ptr<Message> request;
  {
    const trace::Span span("decode request", traced);
    DecodedMessage decoded;
    if (Error error = decode(std::move(incoming), streams, decoded)) {
      respondWithError(from, callId, couldNotReceive(error));
      return;
    }
    request = std::move(decoded.message);
  }
  if (runsPython(request->type())) {
    AgentThreads::runHooks();
  }
  std::shared_ptr<void> making;
  c10::intrusive_ptr<JitFuture> response;
  try {
    making = rrefHolders_.note(from.info().id_, *request);
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
  response->addCallback([self = shared_from_this(), &from, callId, making](JitFuture& completed) {
    self->asyncRequests_.fetch_sub(1);
    self->respond(from, callId, completed);
  });
}

c10::intrusive_ptr<JitFuture> UcxRpcAgent::handle(
    c10::intrusive_ptr<Message> request, const Streams& streams, Admission& admission) const {
  const HandlingScope scope(admission);
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
    mail = encodeMessage(response.constValue().toCustomClass<Message>(), to, replyDeviceMap(to.info()), *transport_);
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
      encodeMessage(rpc::createExceptionResponse(what, static_cast<int64_t>(callId)), to, {}, *transport_));
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

} // namespace torch_ucx_rpc
