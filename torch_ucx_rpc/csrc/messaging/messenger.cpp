#include "messaging/messenger.h"

#include "base/warnings.h"
#include "runtime/worker_mutex.h"

namespace torch_ucx_rpc {

namespace {

// The most rounds of progress to take in everything that has arrived. Each round takes in several messages.
constexpr int kMaxSteps = 1000;

// An acknowledgement waits this long at most for a frame that can carry it. Until then the peer keeps its sent
// messages: their tensors, and at most 8 MiB of eager bodies of each kind.
constexpr auto kAcknowledgeWithin = std::chrono::milliseconds(20);

} // namespace

Messenger::Messenger(
    std::unique_ptr<Transport> transport,
    Identity self,
    const Directory& directory,
    const DevicesInUse& devices,
    const EventHandlers& handlers,
    Executor& executor,
    Timer& timer,
    const Lifetime& lifetime,
    CopyForSelf copyForSelf,
    const Options& options)
    : self_(self),
      handlers_(handlers),
      executor_(executor),
      lifetime_(lifetime),
      copyForSelf_(copyForSelf),
      windowTask_(timer.add([this](Timer::TimePoint now) { return checkWindow(now); })),
      acknowledgeTask_(timer.add([this](Timer::TimePoint now) { return acknowledge(now); })),
      transport_(std::move(transport)),
      sentMessages_(executor, lifetime, timer),
      events_(handlers, sentMessages_, executor, lifetime),
      progress_(*transport_, *this, options.waiting),
      outbox_(*transport_, self_, connections_, share_, events_),
      inbox_(
          {*transport_,
           connections_,
           std::make_shared<ReceiveWindow>(
               options.receiveWindowBytes, [this] { progress_.requestStartDeferred(); }), // admits messages that wait
           handlers,
           devices,
           events_,
           [this] { progress_.requestStartDeferred(); }},
          directory,
          self.session),
      parts_{*transport_, connections_, outbox_, events_, progress_, directory, executor, timer, lifetime},
      devices_(parts_, devices),
      repair_(parts_),
      retries_(parts_, repair_) {
  transport_->setListener(&inbox_);
}

// ------------------------------------------------------------------------------------------------------ sending

void Messenger::post(Peer& to, wire::Kind kind, uint64_t callId, std::unique_ptr<OutgoingMessage> message) {
  message->to = &to;
  message->address(kind, self_.session, self_.rank, to.member().session, callId);
  if (transportTo(to) == nullptr) {
    deliverToSelf(std::move(message));
    return;
  }
  if (message->stagedBytes != 0) {
    countStaged(*message);
  }
  message->sealContent(); // takes long for a large payload, so it comes before the worker lock
  progress_.submit([this, message = std::move(message)]() mutable { outbox_.send(std::move(message)); });
}

void Messenger::postControl(Peer& to, ControlFrame frame) {
  auto message = std::make_unique<OutgoingMessage>();
  message->body = std::move(frame.body);
  post(to, frame.kind, frame.callId, std::move(message));
}

void Messenger::deliverToSelf(std::unique_ptr<OutgoingMessage> message) {
  IncomingMessage arrived;
  arrived.from = message->to;
  arrived.header = message->header;
  arrived.eagerBody = std::move(message->body);
  const Error error = copyForSelf_(*message, arrived);
  Peer& self = *message->to;
  const uint64_t callId = message->header.callId;
  switch (message->header.kind) {
    case wire::Kind::kRequest:
      if (error) {
        handlers_.requests->onRequestRejected(self, callId, error);
      } else {
        handlers_.requests->onRequest(std::move(arrived));
      }
      return;
    case wire::Kind::kResponse:
      if (error) {
        handlers_.answers->onAnswerRejected(self, callId, error);
      } else {
        WorkAtEnd atEnd; // stays empty: this thread does not drive, so an agent thread completes the call
        handlers_.answers->onAnswer(std::move(arrived), {}, atEnd);
      }
      return;
    case wire::Kind::kPut:
      if (!error) {
        handlers_.puts->onPut(std::move(arrived), {});
      }
      handlers_.puts->onPutSent(self, callId, error);
      return;
    default:
      return; // no worker sends control frames to itself
  }
}

void Messenger::countStaged(const OutgoingMessage& message) {
  const bool isFirst = stagedBytes_.fetch_add(message.stagedBytes, std::memory_order_relaxed) == 0;
  if (isFirst && !transport_->deviceMemoryRefusal()) { // otherwise DeviceMaps has warned
    warn(
        "tensors for " + message.to->describe() +
        " are in device memory that UCX cannot share with another process: they are copied through the host's "
        "memory, which is slower. Either it is memory of cudaMallocAsync or of torch's expandable_segments (unset "
        "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF), or UCX_TLS excludes cuda_ipc, or that worker is in "
        "another PID namespace. This is said once.");
  }
}

void Messenger::cancel(std::vector<std::pair<Peer*, uint64_t>> calls) {
  progress_.submit([this, calls = std::move(calls)] {
    for (const auto& [to, id] : calls) {
      // The callee of a request that has left drops the parts that it has not received.
      if (!outbox_.cancel(*to, id)) {
        outbox_.sendControl(*to, wire::Kind::kCancel, id);
      }
      inbox_.dropAnswer(*to, id);
    }
  });
}

void Messenger::receivePut(Peer& from, uint64_t number, std::vector<c10::DataPtr> into) {
  progress_.submit(
      [this, &from, number, into = std::move(into)]() mutable { inbox_.receivePut(from, number, std::move(into)); });
}

void Messenger::dropPut(Peer& from, uint64_t number) {
  progress_.submit([this, &from, number] { inbox_.dropPut(from, number); });
}

void Messenger::onAdmitted(Peer& peer) {
  progress_.submit([this, &peer] { outbox_.onAdmitted(peer); });
}

void Messenger::onPeerGone(Peer& peer) {
  progress_.submit([this, &peer] {
    inbox_.dropPeer(peer);
    outbox_.abandon(peer);
  });
  requestRepair(); // the peer may have died while it wrote into this worker's shared memory
}

void Messenger::acceptJoins(const std::string& joinKey) {
  progress_.run([&] { inbox_.acceptJoins(joinKey); });
}

Error Messenger::checkContent(const IncomingMessage& message) {
  if (message.isContentGenuine()) {
    return {};
  }
  inbox_.countRefused();
  return {
      ErrorCode::kProtocol,
      "a message of " + message.from->describe() + " has arrived with content that its sender did not seal"};
}

// ------------------------------------------------------------------------------------------------------ driving

bool Messenger::lead() {
  const std::unique_ptr<EventBatch> events = progress_.lead([this] { return lifetime_.isClosed(); });
  const bool isNeeded = events != nullptr || lifetime_.isClosed();
  const std::shared_ptr<void> hold = lifetime_.hold(); // work that a driver does at once may outlast a shutdown
  if (events != nullptr) {
    events->dispatch(Driver{Role::kLeader, std::nullopt});
  }
  return isNeeded;
}

// One round: starts the work that callbacks of the transport, other threads and devices have made possible. It visits
// only the connections that are ready.
void Messenger::startDeferredWithWorkerLock() {
  assertHoldsWorkerLock();
  devices_.beginRoundWithWorkerLock();
  inbox_.admitWaiting(); // first, since the connections then receive what was admitted
  bool mustRetry = false;
  connections_.forEachReady([&](Connection& connection) {
    inbox_.receiver().startDeferred(connection);
    outbox_.startDeferred(connection);
    // The driving thread answers at once. An answer that goes through post() might wait for a thread that waits for
    // Python.
    if (std::exchange(connection.isPinged, false)) {
      const bool isLost = connection.peer().state() == Peer::State::kFailed;
      const ControlFrame answer = isLost ? goodbyeToLost() : ControlFrame{wire::Kind::kPong};
      outbox_.sendControl(connection.peer(), answer.kind, answer.callId);
    }
    mustRetry |= connection.isMoving && !repair_.moveWithWorkerLock(connection);
    mustRetry |= connection.mustRetry();
  });
  inbox_.receiver().releaseAll();
  if (connections_.hasReady() || inbox_.hasMadeRoom()) {
    progress_.requestStartDeferredWithWorkerLock();
  }
  if (connections_.waitsForDevice()) {
    devices_.askAgain();
  }
  if (mustRetry || outbox_.hasStranded()) {
    retries_.schedule();
  }
  if (inbox_.window().waitingMessages.load() != 0) {
    windowTask_.dueIn(ReceiveWindow::kPatience);
  }
  if (!connections_.owing().empty() && !acknowledgeTask_.isScheduled()) {
    acknowledgeTask_.dueIn(kAcknowledgeWithin);
  }
}

Timer::TimePoint Messenger::acknowledge(Timer::TimePoint /*now*/) {
  progress_.submit([this] {
    for (Connection* const connection : connections_.takeOwing()) {
      connection->incoming.isOwing = false;
      if (connection->incoming.unacknowledgedBytes != 0 && !lifetime_.isClosed()) {
        outbox_.acknowledge(*connection);
      }
      if (connection->lacking() != 0) {
        retries_.schedule();
      }
    }
  });
  return Timer::kNever;
}

void Messenger::drainTransportWithWorkerLock() {
  assertHoldsWorkerLock();
  try {
    for (int steps = 0; !lifetime_.isClosed() && steps < kMaxSteps && transport_->progress() != 0; ++steps) {
    }
  } catch (const std::exception&) {
    // A callback had no memory. The thread that drives next takes in the rest.
  }
}

Timer::TimePoint Messenger::checkWindow(Timer::TimePoint now) {
  // Requests that wait for a thread will run and give their bytes back.
  const bool isStalled = inbox_.window().hasStalled(now, executor_.counts().waitingRequests != 0);
  if (inbox_.window().waitingMessages.load() == 0) {
    return Timer::kNever;
  }
  progress_.requestStartDeferred(); // a message that has become slow no longer keeps others waiting
  if (isStalled) {
    progress_.submit([this] {
      if (!lifetime_.isClosed()) {
        inbox_.admitStalled();
      }
    });
  }
  return now + ReceiveWindow::kPatience / 2;
}

// ------------------------------------------------------------------------------------------------------ the end

void Messenger::close(int64_t flushLimitMs) {
  progress_.close([this, flushLimitMs] {
    outbox_.close();
    inbox_.receiver().close();
    transport_->close(flushLimitMs);
    retries_.close(); // gives back the reserved files, since the agent object may live on
  });
  sentMessages_.destroyWaiting(); // the timer, which would do it, has stopped
}

// ------------------------------------------------------------------------------------------------------ reports

Messenger::Traffic Messenger::traffic(const std::vector<const Peer*>& peers) {
  Traffic traffic;
  progress_.run([&] {
    traffic.underWay = outbox_.underWay();
    const bool isClosed = lifetime_.isClosed(); // if it is closed by now, UCX's endpoints are gone
    for (const Peer* peer : peers) {
      traffic.lanes.push_back(
          !isClosed && peer->connection != nullptr && peer->connection->endpoint().has_value()
              ? transport_->lanes(*peer->connection->endpoint())
              : std::vector<std::string>());
    }
  });
  return traffic;
}

} // namespace torch_ucx_rpc
