#pragma once

#include "messaging/event_handlers.h"
#include "peers/peer.h"
#include "rpc/agent_parts.h"
#include "rpc/device_maps.h"
#include "torch_glue/rref_holders.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_ucx_rpc {

using torch::distributed::rpc::JitFuture;
using torch::distributed::rpc::RequestCallback;

// Counts a request as open for as long as the object lives, with the peer that sent it (Peer::requestsOpen). To be
// destroyed after the answer is posted: a worker that leaves waits until the count is 0.
class OpenRequest {
 public:
  OpenRequest(Peer& from, uint64_t callId) : from_(&from), callId_(callId) {
    from.requestsOpen.fetch_add(1);
  }
  OpenRequest(OpenRequest&& other) noexcept : from_(std::exchange(other.from_, nullptr)), callId_(other.callId_) {}
  OpenRequest& operator=(OpenRequest&&) = delete;
  ~OpenRequest() {
    if (from_ != nullptr) {
      from_->requestsOpen.fetch_sub(1);
    }
  }

  Peer& from() const {
    return *from_;
  }
  uint64_t callId() const {
    return callId_;
  }

 private:
  Peer* from_;
  uint64_t callId_;
};

// Serves requests, from their arrival to their answers. A request gets exactly one answer, or a refusal with the
// reason. It gets neither if its caller is gone or has given up by then, or if this worker shuts down first.
// Thread-safe.
class RequestServer final : public RequestHandler, private AgentParts {
 public:
  RequestServer(
      const AgentParts& parts, const RequestCallback& callback, RRefHolders& rrefHolders, const DeviceMaps& deviceMaps);

  // The number of requests whose handler has returned a future that is not complete yet.
  size_t openAsync() const;

  // The number of requests that were dropped before they ran, since their callers had given up.
  uint64_t expired() const {
    return expired_.load(std::memory_order_relaxed);
  }

  // RequestHandler.
  bool mayRunOnDriver(const IncomingMessage& request) const override;
  void onRequest(IncomingMessage request) override;
  void runOnDriver(IncomingMessage request) override;
  void onRequestRejected(Peer& from, uint64_t callId, const Error& why) override;
  void onAnswerNotSent(Peer& to, uint64_t callId, const Error& why, bool hasLeftInPart) override;

 private:
  // A request that waits for the future that its handler has returned.
  struct AsyncRequest {
    OpenRequest open;
    std::shared_ptr<void> making; // see RRefHolders::note()
  };

  // Counts a request as received, and as open.
  static OpenRequest take(const IncomingMessage& request);
  using Clock = std::chrono::steady_clock;
  void serve(OpenRequest open, IncomingMessage incoming);
  // Whether a request that came at `arrivedAt` is past its caller's deadline.
  static bool hasExpired(const IncomingMessage& request, Clock::time_point arrivedAt);
  // Runs the handler on this thread, with these streams current.
  c10::intrusive_ptr<JitFuture> handle(
      c10::intrusive_ptr<Message> request, const Streams& streams, Admission& admission) const;
  // Runs the handler of a request that deletes a reference once this value is there. Returns the answer.
  c10::intrusive_ptr<JitFuture> deleteAfter(JitFuture& value, c10::intrusive_ptr<Message> deletion) const;
  uint64_t addAsync(OpenRequest open, std::shared_ptr<void> making);
  AsyncRequest takeAsync(uint64_t id);
  void answer(const OpenRequest& open, const JitFuture& response);
  void answerWithError(Peer& to, uint64_t callId, const std::string& what);
  void refuse(Peer& to, uint64_t callId, const Error& why);
  // The error as the caller reads it.
  Error couldNotReceive(const Error& error) const;
  // The error of a request for which there is no thread.
  Error describeNesting() const;

  const RequestCallback& callback_;
  RRefHolders& rrefHolders_;
  const DeviceMaps& deviceMaps_;

  mutable std::mutex asyncMutex_;
  std::unordered_map<uint64_t, AsyncRequest> async_; // by a number that the server chooses; guarded by asyncMutex_
  uint64_t lastAsync_ = 0; // guarded by asyncMutex_
  std::atomic<uint64_t> expired_{0};
};

} // namespace torch_ucx_rpc
