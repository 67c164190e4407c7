#pragma once

#include "base/rpc_failure.h"
#include "messaging/event_handlers.h"
#include "messaging/messenger.h"
#include "peers/peer_observer.h"
#include "rpc/call_table.h"
#include "rpc/device_maps.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/timer.h"

#include <atomic>
#include <chrono>
#include <functional>

namespace torch_ucx_rpc {

// Calls of this worker, from send() to the completion of their futures. A future is completed exactly once, by the one
// who takes its call out of the table: the answer, the deadline, the end of the callee, or shutdown. Thread-safe.
class CallClient final : public AnswerHandler, public PeerObserver {
 public:
  // `whileWaiting` is called now and then, and when a signal has come in, by threads that wait; it may throw to end the
  // wait (Ctrl-C). Adds a task to the timer, so it must not have started.
  CallClient(
      Identity self,
      Messenger& messenger,
      Executor& executor,
      Timer& timer,
      const Lifetime& lifetime,
      const DeviceMaps& deviceMaps,
      std::function<void()> whileWaiting);

  // Sends a request. `timeout` 0: none. The future holds torch's answer message, or fails with a RpcFailure or with
  // what the callee raised. Throws c10::Error for tensors that cannot be sent.
  c10::intrusive_ptr<JitFuture> send(
      Peer& to, c10::intrusive_ptr<Message> message, std::chrono::milliseconds timeout, const DeviceMap& deviceMap);

  // Returns when the future is complete or the agent shuts down. The caller drives progress meanwhile, if no other
  // caller does.
  void waitDriving(JitFuture& future);
  // The same for a future that another thread completes.
  void waitIdle(JitFuture& future);

  // Fails all open calls.
  void shutDown();

  size_t open() const {
    return calls_.size();
  }
  // Since the beginning.
  uint64_t opened() const {
    return calls_.opened();
  }
  uint64_t timedOut() const {
    return timedOut_.load(std::memory_order_relaxed);
  }

  // AnswerHandler.
  bool isAwaited(const Peer& from, uint64_t callId) const override {
    return calls_.isOpen(callId, from);
  }
  void onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) override;
  void onAnswerRejected(Peer& from, uint64_t callId, const Error& why) override;
  void onRefused(Peer& by, uint64_t callId, const Error& why) override;
  void onRequestNotSent(Peer& to, uint64_t callId, const Error& why) override;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  void complete(CallTable::Call call, IncomingMessage answer);
  static void completeWith(const CallTable::Call& call, const c10::intrusive_ptr<Message>& answer);
  static void fail(const CallTable::Call& call, const std::exception_ptr& why);
  // On an agent thread, where callbacks may run.
  void failLater(CallTable::Call call, const RpcFailure& why);
  void finishCallToLostPeer(CallTable::Call call);
  Timer::TimePoint expire(Timer::TimePoint now);

  const Identity self_;
  Messenger& messenger_;
  Executor& executor_;
  const Lifetime& lifetime_;
  const DeviceMaps& deviceMaps_;
  const std::function<void()> whileWaiting_;
  Timer::Task& expiryTask_;

  CallTable calls_; // own synchronization
  std::atomic<uint64_t> timedOut_{0};
};

} // namespace torch_ucx_rpc
