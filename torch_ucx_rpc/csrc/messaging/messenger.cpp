#include "messaging/messenger.h"

#include "base/warnings.h"
#include "memory/device_pool.h"
#include "memory/host_pool.h"
#include "runtime/worker_mutex.h"

namespace torch_ucx_rpc {

namespace {

// How often devices are asked whether work is done that messages wait for. A short kernel takes about as long.
constexpr auto kDevicePeriod = std::chrono::microseconds(50);

// How often released device memory is checked for uses that are not over.
constexpr auto kCollectionPeriod = std::chrono::milliseconds(100);

// How often a repair is tried. Until it succeeds, nobody can send to this worker over shared memory.
constexpr auto kRepairPeriod = std::chrono::milliseconds(20);

// How often messages are sent again that this process could not send, over a full file table for one.
constexpr auto kRetryPeriod = std::chrono::milliseconds(20);

// How often the log says that messages cannot be sent.
constexpr auto kStrandedReminder = std::chrono::seconds(10);

// The most rounds of progress to take in everything that has arrived. Each round takes in several messages.
constexpr int kMaxSteps = 1000;

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
      directory_(directory),
      devices_(devices),
      handlers_(handlers),
      executor_(executor),
      lifetime_(lifetime),
      copyForSelf_(copyForSelf),
      deviceTask_(timer.add("ask devices", [this](Timer::TimePoint now) { return pollDevices(now); })),
      collectionTask_(
          timer.add("collect device memory", [this](Timer::TimePoint now) { return collectDeviceMemory(now); })),
      windowTask_(timer.add("receive window", [this](Timer::TimePoint now) { return checkWindow(now); })),
      repairTask_(timer.add("repair", [this](Timer::TimePoint now) { return repair(now); })),
      retryTask_(timer.add("retry sends", [this](Timer::TimePoint now) { return retry(now); })),
      transport_(std::move(transport)),
      sentMessages_(executor, lifetime, timer),
      events_(handlers, sentMessages_, executor, lifetime),
      progress_(*transport_, *this, options.waiting),
      window_(std::make_shared<ReceiveWindow>(
          options.receiveWindowBytes, [this] { progress_.requestStartDeferred(); })), // which admits messages that wait
      outbox_(*transport_, share_, events_),
      inbox_(
          *transport_,
          directory,
          outbox_,
          window_,
          HostPool::instance(),
          self.session,
          handlers,
          devices,
          events_,
          [this] { progress_.requestStartDeferred(); }) {
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

void Messenger::postControl(Peer& to, wire::Kind kind, uint64_t callId, Bytes body) {
  auto message = std::make_unique<OutgoingMessage>();
  message->body = std::move(body);
  post(to, kind, callId, std::move(message));
}

void Messenger::sendNowWithWorkerLock(Peer& to, wire::Kind kind, uint64_t callId) {
  assertHoldsWorkerLock();
  auto message = std::make_unique<OutgoingMessage>();
  message->to = &to;
  message->address(kind, self_.session, self_.rank, to.member().session, callId);
  outbox_.send(std::move(message));
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
        WorkAtEnd atEnd; // stays empty: this thread is no driver, so an agent thread completes the call
        handlers_.answers->onAnswer(std::move(arrived), {}, atEnd);
      }
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
      // A request that has left is canceled at its callee, which drops the parts that it has not received.
      if (!outbox_.cancel(*to, id)) {
        sendNowWithWorkerLock(*to, wire::Kind::kCancel, id);
      }
      inbox_.dropAnswer(*to, id);
    }
  });
}

void Messenger::onAdmitted(Peer& peer) {
  progress_.submit([this, &peer] { outbox_.onAdmitted(peer); });
}

void Messenger::onPeerGone(Peer& peer) {
  progress_.submit([this, &peer] {
    inbox_.dropPeer(peer);
    outbox_.abandon(peer);
  });
  requestRepair(); // it may have died while it wrote into the shared memory of this worker
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
      "a message of " + message.from->describe() + " has arrived with another content than it was sealed with"};
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

void Messenger::startDeferredWithWorkerLock() {
  assertHoldsWorkerLock();
  makeContextCurrent(devices_.get()); // any thread may drive, and UCX needs a context on it
  inbox_.startDeferred();
  outbox_.startDeferred();
  if (inbox_.hasDeferred()) {
    progress_.requestStartDeferredWithWorkerLock();
  }
  if (waitsForDeviceWithWorkerLock()) {
    deviceTask_.dueIn(kDevicePeriod);
  }
  if (DevicePool::instance().isCollecting() && !collectionTask_.isScheduled()) {
    collectionTask_.dueNow();
  }
  if (outbox_.hasStranded()) { // nothing tells when the process may open files again
    retryTask_.dueIn(kRetryPeriod);
  }
  answerPingsWithWorkerLock();
  for (Peer* peer : inbox_.takeNetworkRequests()) {
    if (peer->isNeighbour.load()) {
      moving_.push_back(peer);
    }
  }
  moveToNetworkWithWorkerLock();
  if (window_->waitingMessages.load() != 0) {
    windowTask_.dueIn(ReceiveWindow::kPatience);
  }
}

void Messenger::answerPingsWithWorkerLock() {
  assertHoldsWorkerLock();
  // The driving thread answers at once. An answer that goes through post() might wait for a thread that waits for
  // Python.
  for (Peer* peer : inbox_.takePings()) {
    sendNowWithWorkerLock(*peer, wire::Kind::kPong);
  }
}

void Messenger::moveToNetworkWithWorkerLock() {
  assertHoldsWorkerLock();
  if (moving_.empty()) {
    return;
  }
  std::erase_if(moving_, [this](Peer* peer) {
    const Error error = outbox_.moveToNetwork(*peer);
    if (!error && isDeaf_) {
      sendNowWithWorkerLock(*peer, wire::Kind::kUseNetwork);
    }
    return !isLocal(error.code()); // else a file for the connection may be there later
  });
  if (!moving_.empty()) {
    retryTask_.dueIn(kRetryPeriod);
  }
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

template <typename Operation>
void Messenger::submitWhileOpen(Operation operation) {
  progress_.submit([this, operation = std::move(operation)]() mutable {
    if (!lifetime_.isClosed()) {
      operation();
    }
  });
}

// -------------------------------------------------------------------------------------------------- timer tasks

Timer::TimePoint Messenger::pollDevices(Timer::TimePoint /*now*/) {
  progress_.requestStartDeferred(); // which asks the devices, and sets this task again if they are not done
  return Timer::kNever;
}

Timer::TimePoint Messenger::collectDeviceMemory(Timer::TimePoint now) {
  DevicePool& pool = DevicePool::instance();
  // Not on this thread: an allocator may wait for the driver or for Python, and deadlines and new threads for this one.
  if (std::shared_ptr<void> hold = pool.statistics().heldBytes != 0 ? lifetime_.hold() : nullptr) {
    executor_.addCompletion([hold = std::move(hold), &pool] { pool.collect(); });
  }
  // Any thread may release memory that is in use now, and no event tells of it.
  return pool.isCollecting() ? now + kCollectionPeriod : Timer::kNever;
}

Timer::TimePoint Messenger::checkWindow(Timer::TimePoint now) {
  if (window_->waitingMessages.load() == 0) {
    stalledSince_ = {};
    return Timer::kNever;
  }
  progress_.requestStartDeferred(); // a message that has become slow no longer keeps others waiting
  const uint64_t releases = window_->releases();
  const auto patience =
      window_->receivingMessages.load() == 0 ? ReceiveWindow::kPatience : ReceiveWindow::kPatienceWhileReceiving;
  // Requests that wait for a thread will run and give their bytes back, so the window is not stalled.
  if (stalledSince_ == Timer::TimePoint{} || releases != stalledReleases_ || executor_.counts().waitingRequests != 0) {
    stalledReleases_ = releases;
    stalledSince_ = now;
  } else if (now - stalledSince_ >= patience) {
    submitWhileOpen([this] { inbox_.admitStalled(); });
    stalledSince_ = now;
  }
  return now + ReceiveWindow::kPatience / 2;
}

Timer::TimePoint Messenger::retry(Timer::TimePoint now) {
  const bool isTold = now < strandedWarnedAt_ + kStrandedReminder;
  strandedWarnedAt_ = isTold ? strandedWarnedAt_ : now;
  submitWhileOpen([this, isTold] {
    if (!isTold && outbox_.hasStranded()) {
      events_.addWarning(outbox_.describeStranded());
    }
    files_.release(); // for the connections that are tried again now
    moveToNetworkWithWorkerLock();
    outbox_.retryStranded();
    files_.refill();
  });
  return Timer::kNever; // set again if that fails
}

void Messenger::requestRepair() {
  isRepairWanted_.store(true);
  repairTask_.dueNow();
}

Timer::TimePoint Messenger::repair(Timer::TimePoint now) {
  if (now < repairedAt_ + kRepairPeriod) {
    return repairedAt_ + kRepairPeriod; // calls that time out ask for it one by one
  }
  repairedAt_ = now;
  if (isRepairing_.load()) {
    transport_->scanForRepair(); // on this thread, since it may take long: the worker lock is free meanwhile
  }
  submitWhileOpen([this] { repairWithWorkerLock(); });
  // The operation may still be queued. The task then runs once more than needed.
  return isRepairWanted_.load() || isRepairing_.load() ? now + kRepairPeriod : Timer::kNever;
}

void Messenger::repairWithWorkerLock() {
  assertHoldsWorkerLock();
  isRepairWanted_.store(false);
  const RepairState state = transport_->repairState();
  isRepairing_.store(state != RepairState::kWhole);
  if (state == RepairState::kWhole) {
    isDeaf_ = false;
  } else if (state == RepairState::kUnrepairable && !std::exchange(isDeaf_, true)) {
    if (!std::exchange(hasWarnedOfGap_, true)) {
      events_.addWarning(
          "messages of workers on this machine do not arrive: a process has ended or been stopped while it wrote one "
          "into shared memory, and nobody can tell whether it will go on. From now on these workers and this one use "
          "the network, unless UCX_TLS leaves it out; messages that were under way arrive when that process goes on");
    }
    for (Peer* peer : directory_.present()) {
      if (peer->isNeighbour.load()) {
        moving_.push_back(peer);
      }
    }
    moveToNetworkWithWorkerLock();
  }
}

// ------------------------------------------------------------------------------------------------------ the end

void Messenger::close(int64_t flushLimitMs) {
  progress_.close([this, flushLimitMs] {
    outbox_.close();
    inbox_.close();
    transport_->close(flushLimitMs);
    files_.release(); // the agent object may live on
  });
  sentMessages_.destroyWaiting(); // the timer, which would see to it, has stopped
}

// ------------------------------------------------------------------------------------------------------ reports

size_t Messenger::underWay() {
  size_t underWay = 0;
  progress_.run([&] { underWay = outbox_.underWay(); });
  return underWay;
}

Messenger::Traffic Messenger::traffic(const std::vector<const Peer*>& peers) {
  Traffic traffic;
  progress_.run([&] {
    traffic.underWay = outbox_.underWay();
    const bool isClosed = lifetime_.isClosed(); // by now: then UCX's endpoints are gone
    for (const Peer* peer : peers) {
      traffic.lanes.push_back(
          !isClosed && peer->endpoint.has_value() ? transport_->lanes(*peer->endpoint) : std::vector<std::string>());
    }
  });
  return traffic;
}

} // namespace torch_ucx_rpc
