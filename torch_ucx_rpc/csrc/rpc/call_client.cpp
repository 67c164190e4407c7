#include "rpc/call_client.h"

#include "base/trace.h"
#include "rpc/decoding.h"
#include "torch_glue/completion.h"
#include "torch_glue/failed_rref.h"
#include "torch_glue/message_types.h"
#include "torch_glue/torch_state.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// How long expire() looks for an RRef that torch does not know yet. torch knows it once the thread that has called
// send() goes on, but programs may send such requests without torch.
constexpr auto kRRefPatience = std::chrono::seconds(10);

// Delay of a repeated message about a failed RRef, for an owner that had no room for it.
constexpr auto kFailurePeriod = std::chrono::milliseconds(100);

// The call that this thread has made last, which may be over. rpc_sync and RRef.to_here() make a call and then wait, so
// the thread waits for this call. The future does not identify the call: torch derives another future from the call's.
thread_local trace::CallId latestCall;

// Whether a failure concerns one message only: the callee lives, and this worker too.
bool isOfMessage(RpcFailure::Kind kind) {
  return kind == RpcFailure::Kind::kMessageRefused || kind == RpcFailure::Kind::kNotSent ||
      kind == RpcFailure::Kind::kOutOfResources;
}

// The text of a timeout: torch's own words, which programs look for, and the callee.
std::string timeoutText(std::chrono::milliseconds timeout, const Peer& to) {
  std::string text = rpc::kRpcTimeoutErrorStr;
  text.replace(text.find("{}"), 2, std::to_string(timeout.count()));
  return rpc::makeRPCError(text + "; called " + to.describe(), rpc::RPCErrorType::TIMEOUT);
}

} // namespace

CallClient::CallClient(const AgentParts& parts, const DeviceMaps& deviceMaps, std::function<void()> whileWaiting)
    : AgentParts(parts),
      deviceMaps_(deviceMaps),
      whileWaiting_(std::move(whileWaiting)),
      expiryTask_(timer_.add([this](Timer::TimePoint now) { return expire(now); })) {}

// ------------------------------------------------------------------------------------------------------ sending

c10::intrusive_ptr<JitFuture> CallClient::send(
    Peer& to, c10::intrusive_ptr<Message> message, std::chrono::milliseconds timeout, const DeviceMap& deviceMap) {
  trace::Span span("send request", {}, trace::Arrow::kRequestLeaves);
  const rpc::MessageType type = message->type();
  if (type == rpc::MessageType::RREF_USER_DELETE) {
    unmadeRRefs_.noteDeletion(*message);
  }
  const bool mustRun = mustExecute(*message);
  const bool isCreation = mustRun && makesRRef(*message); // a request that makes an RRef must run
  // Encode before the call is open, because encoding throws for tensors that cannot be sent.
  std::unique_ptr<OutgoingMessage> outgoing =
      encodeMessage(std::move(message), to, deviceMap, messenger_.transportTo(to));

  CallTable::Call call;
  call.future = c10::make_intrusive<JitFuture>(at::AnyClassType::get(), deviceMaps_.devices());
  call.to = &to;
  call.type = type;
  call.sentAt = CallTable::Clock::now();
  call.timeout = timeout;
  call.mustRun = mustRun;
  call.makesRRef = isCreation;
  if (timeout.count() != 0) { // 0: no limit
    call.deadline = call.sentAt + timeout;
    constexpr std::chrono::milliseconds kLongest(std::numeric_limits<uint32_t>::max());
    outgoing->header.deadlineMs = !mustRun && timeout < kLongest ? static_cast<uint32_t>(timeout.count()) : 0;
  }
  call.nesting = Executor::markBlocked();
  c10::intrusive_ptr<JitFuture> future = call.future;
  latestCall = {self_.session, begin(std::move(call), std::move(outgoing))};
  span.belongsTo(latestCall);
  return future;
}

uint64_t CallClient::begin(CallTable::Call call, std::unique_ptr<OutgoingMessage> request) {
  Peer& to = *call.to;
  const CallTable::Clock::time_point deadline = call.deadline;
  const bool mustRun = call.mustRun;
  const bool makesRRef = call.makesRRef;
  // Without credit even a small body waits here until the callee asks for it.
  request->waitsForRoom = request->isBodyEager() && !call.eager.take(to, request->body.size(), messenger_.share());
  bool isEarliest = false;
  const uint64_t id = calls_.open(std::move(call), isEarliest);
  if (isEarliest) {
    expiryTask_.dueBy(deadline);
  }
  to.callsSent.fetch_add(1, std::memory_order_relaxed);
  if (makesRRef) {
    unmadeRRefs_.add(id, to);
  }

  // The state is read after the call is in the table. A thread that marks the peer gone later finds the call there.
  const bool isGone = to.state() != Peer::State::kPresent;
  if (isGone || lifetime_.isClosed()) {
    if (std::optional<CallTable::Call> taken = calls_.take(id, to)) {
      (void)unmadeRRefs_.take(id, to); // torch cannot have deleted the reference yet
      if (isGone) {
        finishCallToLostPeer(std::move(*taken));
      } else {
        const std::string what = "RPC is not running on worker '" + self_.name +
            "': it has been shut down, so nothing can be sent to " + to.describe();
        fail(*taken, std::make_exception_ptr(to.failure(RpcFailure::Kind::kShutDown, what)));
      }
    }
    return id;
  }
  messenger_.post(to, wire::Kind::kRequest, id, std::move(request));
  // The call may have timed out by now, because sealing took long or this thread did not run. Then it was canceled
  // before there was a request to take back. Without this, the request would wait, and hold its memory, for a peer that
  // takes nothing in.
  if (CallTable::Clock::now() >= deadline && mayCancel(to, mustRun)) {
    messenger_.cancel({{&to, id}});
  }
  return id;
}

// --------------------------------------------------------------------------------------------------- completing

void CallClient::onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) {
  const trace::Span span("receive answer", answer.call(), trace::Arrow::kAnswerArrives);
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    return; // being destroyed
  }
  const uint64_t id = answer.header.callId;
  std::optional<CallTable::Call> call = calls_.take(id, *answer.from);
  settleRRef(call, id, *answer.from);
  if (!call) {
    return; // a late answer, or one of a worker that was not asked; its memory is released here
  }
  // A driver itself completes the call that it waits for, so no thread has to be woken. A thread that drives keeps the
  // agent alive until the batch is done.
  if (driver && (id == driver->awaitedCall || mayCompleteOnDriver(call->type))) {
    atEnd.emplace_back([this, call = std::move(*call), answer = std::move(answer)]() mutable {
      complete(std::move(call), std::move(answer));
    });
    return;
  }
  executor_.addCompletion(
      [this, hold = std::move(hold), call = std::move(*call), answer = std::move(answer)]() mutable {
        complete(std::move(call), std::move(answer));
        messenger_.progress().wakeWaitingCaller(); // a sleeping caller may wait for this call
        messenger_.destroySent();
      });
}

void CallClient::settleRRef(const std::optional<CallTable::Call>& call, uint64_t callId, Peer& peer) {
  if (call && !call->makesRRef) {
    return;
  }
  if (const c10::intrusive_ptr<Message> deletion = unmadeRRefs_.take(callId, peer)) {
    // No caller waits for its answer: torch has had the answer to the first deletion.
    (void)send(peer, deletion, std::chrono::milliseconds(0), {});
  }
}

void CallClient::complete(CallTable::Call call, IncomingMessage answer) {
  const trace::Span span("complete call", answer.call());
  const Peer& from = *answer.from;
  Streams streams;
  DecodedMessage decoded;
  // Decoding uses up the message and gives its share of the window back. Callbacks of the future may wait for other
  // answers, which need room in the window.
  if (const Error error = decodeArrived(messenger_, deviceMaps_, std::move(answer), streams, decoded)) {
    const std::string what = "the answer of " + from.describe() + " is unreadable: " + error.message();
    failLater(std::move(call), from.failureFrom(error, what));
    return;
  }
  if (decoded.message->type() == rpc::MessageType::EXCEPTION) {
    const std::vector<char>& payload = decoded.message->payload();
    std::string text(payload.begin(), payload.end());
    if (call.makesRRef && !call.failure) {
      tellOwner(std::move(call), std::move(text));
    } else {
      fail(call, std::make_exception_ptr(std::runtime_error(text)));
    }
    return;
  }
  call.to->latencies.add(CallTable::Clock::now() - call.sentAt);
  if (runsPython(call.type)) {
    Executor::runHooks(); // callbacks may run Python
  }
  // Message::getStorages() would throw for undefined tensors and for the compressed sparse layouts.
  const c10::MultiStreamGuard guard(streams); // the future makes its readers wait for these streams
  runCallbacks([&] { call.future->markCompleted(std::move(decoded.message), std::move(decoded.deviceStorages)); });
}

void CallClient::completeWith(const CallTable::Call& call, const c10::intrusive_ptr<Message>& answer) {
  runCallbacks([&] { call.future->markCompleted(answer, answer->getStorages()); });
}

void CallClient::fail(const CallTable::Call& call, const std::exception_ptr& why) const {
  call.to->callsFailed.fetch_add(1, std::memory_order_relaxed);
  // Found first: torch may forget an RRef of this worker in the future's callback.
  const std::optional<CreatedRRef> own =
      call.makesRRef && isSelf(*call.to) ? findCreatedRRef(*call.future) : std::nullopt;
  runCallbacks([&] { call.future->setError(why); });
  if (own) {
    const RpcFailure lost = call.to->failure(
        RpcFailure::Kind::kRRefLost, "this RRef will never have a value: its rpc.remote() has timed out");
    runCallbacks([&] { failIfForgotten(*own, std::make_exception_ptr(lost)); });
  }
}

void CallClient::failLater(CallTable::Call call, const RpcFailure& why) {
  std::shared_ptr<void> hold = lifetime_.hold();
  if (call.makesRRef && isOfMessage(why.kind()) && hold != nullptr) {
    tellOwner(std::move(call), std::string("this RRef will never have a value: ") + why.what());
    return;
  }
  std::exception_ptr failure = std::make_exception_ptr(why);
  if (hold == nullptr) { // being destroyed: no other thread will do it
    fail(call, failure);
    return;
  }
  executor_.addFailure([this, hold = std::move(hold), call = std::move(call), failure = std::move(failure)] {
    fail(call, failure);
    messenger_.progress().wakeWaitingCaller();
  });
}

void CallClient::finishCallToLostPeer(CallTable::Call call) {
  c10::intrusive_ptr<Message> answer = syntheticAck(call.type);
  std::shared_ptr<void> hold = lifetime_.hold();
  if (answer == nullptr || hold == nullptr) {
    const RpcFailure why = call.to->failureOfGone();
    failLater(std::move(call), why);
    return;
  }
  // No waiting caller is woken, since no thread waits for torch's bookkeeping.
  executor_.addCompletion(
      [hold = std::move(hold), call = std::move(call), answer = std::move(answer)] { completeWith(call, answer); });
}

void CallClient::onAnswerRejected(Peer& from, uint64_t callId, const Error& why) {
  std::optional<CallTable::Call> call = calls_.take(callId, from);
  settleRRef(call, callId, from);
  if (call) {
    const std::string what = "could not receive the answer of " + from.describe() + ": " + why.message();
    failLater(std::move(*call), from.failureFrom(why, what));
  }
}

void CallClient::onRefused(Peer& by, uint64_t callId, const Error& why) {
  std::optional<CallTable::Call> call = calls_.take(callId, by);
  settleRRef(call, callId, by);
  if (call) {
    failLater(std::move(*call), by.failureFrom(why, why.message()));
  }
}

void CallClient::onRequestNotSent(Peer& to, uint64_t callId, const Error& why) {
  std::optional<CallTable::Call> call = calls_.take(callId, to);
  settleRRef(call, callId, to);
  if (call) {
    if (to.whyGone()) {
      failLater(std::move(*call), to.failureOfGone());
    } else {
      const std::string what = "could not send to " + to.describe() + ": " + why.message();
      failLater(std::move(*call), to.failureFrom(why, what));
    }
  }
}

void CallClient::onPeerGone(Peer& peer) {
  unmadeRRefs_.forget(peer);
  for (CallTable::Call& call : calls_.takeAll(&peer)) {
    finishCallToLostPeer(std::move(call));
  }
}

bool CallClient::isSelf(const Peer& to) const {
  return to.member().session == self_.session;
}

bool CallClient::mayCancel(const Peer& to, bool mustRun) const {
  return !isSelf(to) && !mustRun;
}

Timer::TimePoint CallClient::expire(Timer::TimePoint now) {
  Timer::TimePoint next = Timer::kNever;
  std::vector<std::pair<Peer*, uint64_t>> abandoned;
  std::vector<CallTable::Expired> expired = calls_.takeExpired(now, next);
  for (CallTable::Expired& one : expired) {
    if (one.call.failure && now < one.call.end()) {
      next = std::min(next, one.call.end());
      if (sendFailure(one.call)) {
        continue;
      }
      if (now < one.call.sentAt + kRRefPatience) {
        next = std::min(next, now + kRRefPeriod);
        expireLater(std::move(one), now + kRRefPeriod);
      } else {
        const RpcFailure lost{RpcFailure::Kind::kRRefLost, *one.call.failure};
        failLater(std::move(one.call), lost);
      }
      continue;
    }
    if (one.call.makesRRef) {
      if (const std::optional<rpc::ForkId> reference = markTimedOutRRef(*one.call.future)) {
        unmadeRRefs_.giveUp(one.id, *reference);
      } else if (now < one.call.end() + kRRefPatience) {
        next = std::min(next, now + kRRefPeriod);
        expireLater(std::move(one), now + kRRefPeriod);
        continue;
      }
    }
    timedOut_.fetch_add(1, std::memory_order_relaxed);
    Peer& to = *one.call.to;
    if (mayCancel(to, one.call.mustRun)) {
      abandoned.emplace_back(&to, one.id);
    }
    const std::chrono::milliseconds timeout = one.call.timeout;
    const Member& callee = to.member();
    failLater(
        std::move(one.call),
        {RpcFailure::Kind::kTimedOut,
         timeoutText(timeout, to),
         {.name = callee.name, .rank = callee.rank, .host = callee.host, .timeout = timeout}});
  }
  if (!abandoned.empty()) {
    // The callee need not receive the rest of these requests. A handler that runs is not interrupted. Canceling comes
    // after the failures, because it may make progress for others.
    messenger_.cancel(std::move(abandoned));
  }
  if (!expired.empty()) {
    // Calls also time out if a dead process blocks this worker's shared memory.
    messenger_.requestRepair();
  }
  return next;
}

void CallClient::expireLater(CallTable::Expired expired, Timer::TimePoint when) {
  calls_.reopen(std::move(expired), when);
  failAllIfClosed();
}

void CallClient::failAllIfClosed() {
  // A shutdown that begins now finds the call in the table. One that has begun may have emptied the table before.
  if (lifetime_.isClosed()) {
    shutDown();
  }
}

void CallClient::shutDown() {
  for (const CallTable::Call& call : calls_.takeAll()) {
    const std::string what =
        "RPC was shut down on worker '" + self_.name + "' before " + call.to->describe() + " answered";
    fail(call, std::make_exception_ptr(call.to->failure(RpcFailure::Kind::kShutDown, what)));
  }
}

// ------------------------------------------------------------------------------------------- RRefs without a value

void CallClient::tellOwner(CallTable::Call call, std::string failure) {
  if (call.failure) { // the owner had no room for it
    sendFailureLater(std::move(call), kFailurePeriod);
    return;
  }
  call.failure = std::move(failure);
  if (!sendFailure(call)) {
    sendFailureLater(std::move(call), kRRefPeriod);
  }
}

bool CallClient::sendFailure(CallTable::Call& call) {
  c10::intrusive_ptr<Message> request = describeFailedRRef(*call.future, *call.failure);
  if (request == nullptr) {
    return false;
  }
  call.deadline = call.end();
  call.eager = {};
  Peer& owner = *call.to;
  begin(std::move(call), encodeMessage(std::move(request), owner, {}, messenger_.transportTo(owner)));
  return true;
}

void CallClient::sendFailureLater(CallTable::Call call, std::chrono::milliseconds delay) {
  const CallTable::Clock::time_point when = std::min(CallTable::Clock::now() + delay, call.end());
  call.deadline = when;
  bool isEarliest = false;
  calls_.open(std::move(call), isEarliest);
  expiryTask_.dueBy(when);
  failAllIfClosed();
}

// ------------------------------------------------------------------------------------------------------ waiting

void CallClient::waitDriving(JitFuture& future) {
  const auto awaited = latestCall.session == self_.session ? std::optional(latestCall.number) : std::nullopt;
  while (!future.completed() && !lifetime_.isClosed()) {
    if (!messenger_.progress().driveUntil([&] { return future.completed() || lifetime_.isClosed(); }, awaited)) {
      waitIdle(future); // another caller drives
    } else if (!future.completed()) {
      whileWaiting_(); // a signal may have come in
    }
  }
}

void CallClient::waitIdle(JitFuture& future) {
  // Shared with the callback, which outlives this wait if whileWaiting_() throws.
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool isComplete = false;
  };
  if (future.completed()) {
    return;
  }
  const auto completion = std::make_shared<Completion>();
  constexpr bool kNeedsValue = false; // so torch makes no stream wait for it
  future.addCallback(
      [completion](JitFuture& /*future*/) {
        const std::lock_guard lock(completion->mutex);
        completion->isComplete = true;
        completion->changed.notify_all();
      },
      kNeedsValue);
  std::unique_lock lock(completion->mutex);
  const auto isOver = [&] { return completion->isComplete || lifetime_.isClosed(); };
  while (!completion->changed.wait_for(lock, kSignalCheckPeriod, isOver)) {
    // whileWaiting_() takes the GIL. The thread that completes the future may have it, and needs this lock.
    lock.unlock();
    whileWaiting_();
    lock.lock();
  }
}

} // namespace torch_ucx_rpc
