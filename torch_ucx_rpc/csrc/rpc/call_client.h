#pragma once

#include "base/rpc_failure.h"
#include "messaging/event_handlers.h"
#include "peers/peer.h"
#include "rpc/agent_parts.h"
#include "rpc/call_table.h"
#include "rpc/device_maps.h"
#include "rpc/unmade_rrefs.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace torch_ucx_rpc {

// Makes the calls of this worker, from send() to the completion of their futures. A call ends with its answer, its
// deadline, the end of the callee, or shutdown. The first of these takes the call out of the table, and completes its
// future. Thread-safe.
class CallClient final : public AnswerHandler, public PeerObserver, private AgentParts {
 public:
  // Threads that wait call `whileWaiting` now and then, and when a signal has come in. It may throw to end the wait
  // (Ctrl-C).
  CallClient(const AgentParts& parts, const DeviceMaps& deviceMaps, std::function<void()> whileWaiting);

  // Sends a request. A `timeout` of 0 means none. The future holds torch's answer message, or fails with an RpcFailure
  // or with what the callee raised. Throws c10::Error for tensors that cannot be sent.
  c10::intrusive_ptr<JitFuture> send(
      Peer& to, c10::intrusive_ptr<Message> message, std::chrono::milliseconds timeout, const DeviceMap& deviceMap);

  // Returns when the future is complete or the agent shuts down. Until then the caller drives progress, if no other
  // caller does.
  void waitDriving(JitFuture& future);
  // Like waitDriving(), but leaves driving to other threads.
  void waitIdle(JitFuture& future);

  // Fails all open calls.
  void shutDown();

  // The number of calls that wait for an answer.
  size_t open() const {
    return calls_.size();
  }
  // Whether torch has deleted references to RRefs whose owners are still making them.
  bool owesDeletions() const {
    return unmadeRRefs_.owesAny();
  }
  // The number of calls ever made, and of calls that have timed out.
  uint64_t opened() const {
    return calls_.opened();
  }
  uint64_t timedOut() const {
    return timedOut_.load(std::memory_order_relaxed);
  }

  // AnswerHandler.
  bool isAwaited(const Peer& from, uint64_t callId) const override {
    return calls_.isOpen(callId, from) || unmadeRRefs_.isAwaited(callId, from);
  }
  void onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) override;
  void onAnswerRejected(Peer& from, uint64_t callId, const Error& why) override;
  void onRefused(Peer& by, uint64_t callId, const Error& why) override;
  void onRequestNotSent(Peer& to, uint64_t callId, const Error& why) override;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  // How often expire() looks for an RRef that torch does not know yet.
  static constexpr std::chrono::milliseconds kRRefPeriod{1};

  // Opens the call, posts its request, and returns the call's id.
  uint64_t begin(CallTable::Call call, std::unique_ptr<OutgoingMessage> request);
  // To be called when the peer has answered a call, or never will. `call` is what CallTable::take() has returned. If
  // torch has given up the RRef that the call was to make, and deleted its reference, sends the deletion again.
  void settleRRef(const std::optional<CallTable::Call>& call, uint64_t callId, Peer& peer);
  void complete(CallTable::Call call, IncomingMessage answer);
  static void completeWith(const CallTable::Call& call, const c10::intrusive_ptr<Message>& answer);
  // Fails the future of a call that is out of the table. Runs callbacks, which may run Python, so hold no lock.
  void fail(const CallTable::Call& call, const std::exception_ptr& why) const;
  // Fails a call on an agent thread, where callbacks may run. If the call was to make an RRef, and the failure concerns
  // its message only, tells the owner first.
  void failLater(CallTable::Call call, const RpcFailure& why);
  // Keeps a call open that has not made its RRef, and sends the owner the failure. The owner makes an RRef whose value
  // is the failure (see failed_rref.h). Called again if the owner could not take the failure.
  void tellOwner(CallTable::Call call, std::string failure);
  // Sends the owner the failure. False if torch does not know the RRef yet.
  bool sendFailure(CallTable::Call& call);
  // Makes expire() send the failure later.
  void sendFailureLater(CallTable::Call call, std::chrono::milliseconds delay);
  // Fails a call to a peer that is gone, or acknowledges it in the peer's place if torch needs that (syntheticAck()).
  void finishCallToLostPeer(CallTable::Call call);
  // Whether a call to this peer is one of this worker to itself.
  bool isSelf(const Peer& to) const;
  // Whether a request to this peer may be taken back once its caller has given up.
  bool mayCancel(const Peer& to, bool mustRun) const;
  // Timer task: fails the calls whose deadlines have come.
  Timer::TimePoint expire(Timer::TimePoint now);
  // Puts an expired call back, to be looked at again at `when`.
  void expireLater(CallTable::Expired expired, Timer::TimePoint when);
  // To be called after a call was put into the table without a message to its peer. Fails all calls if shutdown has
  // begun.
  void failAllIfClosed();

  const DeviceMaps& deviceMaps_;
  const std::function<void()> whileWaiting_;
  Timer::Task& expiryTask_;

  CallTable calls_; // own synchronization
  UnmadeRRefs unmadeRRefs_; // own synchronization
  std::atomic<uint64_t> timedOut_{0};
};

} // namespace torch_ucx_rpc
