// Construction, members, start and end, reports; what happens to a call is in agent_calls.cpp.

#include "agent/agent.h"

#include "base/time.h"

#include <c10/util/Logging.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace {

constexpr auto kForEver = CallTable::Clock::time_point::max();
// How often a thread that blocks in barrier() or join() looks up.
constexpr auto kLookUp = std::chrono::milliseconds(100);
// At shutdown: for handlers that are still running, and for what was sent last.
constexpr auto kHandlerGrace = std::chrono::milliseconds(1000);
constexpr int64_t kFlushLimitMs = 1000;

uint64_t randomSession() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

} // namespace

UcxRpcAgent::UcxRpcAgent(
    std::string name,
    worker_id_t rank,
    std::unique_ptr<Transport> transport,
    std::unique_ptr<RequestCallback> callback,
    ThreadHooks threadHooks,
    std::function<void()> whileWaiting,
    const AgentOptions& options)
    : RpcAgent(WorkerInfo(std::move(name), rank), std::move(callback), options.rpcTimeout),
      options_(options),
      session_(randomSession()),
      threadHooks_(std::move(threadHooks)),
      whileWaiting_(std::move(whileWaiting)),
      transport_(std::move(transport)),
      window_(std::make_shared<ReceiveWindow>(
          options.receiveWindowBytes,
          [this] { progress_->submit([] {}); })), // settling, which follows, admits what waits
      processes_([this](int fd, UniqueFunction<void()> onReadable) { progress_->watch(fd, std::move(onReadable)); }),
      barrier_(
          directory_,
          rank,
          [this](Peer& coordinator, uint64_t round, int64_t value) {
            const wire::BarrierArrive body{value};
            postControl(coordinator, wire::Kind::kBarrierArrive, round, Bytes(std::as_bytes(std::span(&body, 1))));
          },
          [this](Peer& to, uint64_t round, const Barrier::Result& result) {
            const wire::BarrierRelease release{result.sum, result.error ? 1u : 0u, 0};
            Bytes body(std::as_bytes(std::span(&release, 1)));
            body.append(result.error.message().data(), result.error.message().size());
            postControl(to, wire::Kind::kBarrierRelease, round, std::move(body));
          }),
      timer_([this](Timer::Clock::time_point now) { return onTimer(now); }) {
  progress_ = std::make_unique<Progress>(
      *transport_,
      [this] {
        inbox_->settle();
        if (window_->waitingMessages.load() != 0 && !isStallTimerSet_.exchange(true)) {
          timer_.dueBy(Timer::Clock::now() + ReceiveWindow::kPatience);
        }
      },
      [this](Deliveries deliveries) { dispatch(std::move(deliveries)); });
  outbox_ = std::make_unique<Outbox>(*transport_, progress_->deliveries());
  inbox_ = std::make_unique<Inbox>(
      *transport_,
      directory_,
      *outbox_,
      window_,
      HostPool::instance(),
      session_,
      [this](const Peer& from, uint64_t callId) { return calls_.isOpen(callId, from); },
      progress_->deliveries());
  transport_->setListener(inbox_.get());
  threads_ = std::make_shared<AgentThreads>(
      options.numWorkerThreads,
      threadHooks_,
      [this] { dispatch(progress_->lead([this] { return isClosed_.load(); })); },
      [this](AgentThreads::Clock::time_point when) { timer_.dueBy(when); });
}

UcxRpcAgent::~UcxRpcAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown(); // else ~RpcAgent would, and find shutdownImpl gone
  }
  shutdownImpl();
}

// ---------------------------------------------------------------------------------------------------- members

void UcxRpcAgent::addMembers(std::vector<Member> members) {
  for (Member& member : members) {
    directory_.add(std::move(member));
  }
  const Peer* self = directory_.findSession(session_);
  TORCH_CHECK(self != nullptr, "worker '", workerInfo_.name_, "' was not told of itself");
  for (Peer* peer : directory_.present()) {
    if (peer == self || std::exchange(peer->isWatched, true)) {
      continue;
    }
    const Error ended(ErrorCode::kPeerFailed, "its process has ended");
    const ProcessWatch::Outcome outcome = processes_.add(peer->member(), self->member(), [this, peer, ended] {
      progress_->deliveries().failures.push_back({peer, ended}); // runs under the worker lock
    });
    if (outcome == ProcessWatch::Outcome::kHasEnded) {
      onPeerGone(*peer, Peer::State::kFailed, peer->lost(ended));
    }
  }
}

void UcxRpcAgent::removeMember(worker_id_t rank) {
  directory_.remove(rank);
  barrier_.onMembershipChange();
}

const WorkerInfo& UcxRpcAgent::getWorkerInfo(const std::string& name) const {
  return directory_.at(name).info();
}

const WorkerInfo& UcxRpcAgent::getWorkerInfo(worker_id_t rank) const {
  return directory_.at(rank).info();
}

std::vector<WorkerInfo> UcxRpcAgent::getWorkerInfos() const {
  std::vector<WorkerInfo> infos;
  for (const Peer* peer : directory_.all()) {
    infos.push_back(peer->info());
  }
  return infos;
}

void UcxRpcAgent::setDeviceMaps(
    std::unordered_map<std::string, DeviceMap> deviceMaps,
    std::unordered_map<std::string, DeviceMap> reverseDeviceMaps,
    std::vector<c10::Device> devices) {
  const std::lock_guard lock(mutex_);
  deviceMaps_ = std::move(deviceMaps);
  reverseDeviceMaps_ = std::move(reverseDeviceMaps);
  devices_ = std::move(devices);
}

DeviceMap UcxRpcAgent::getDeviceMap(const WorkerInfo& to) const {
  const std::lock_guard lock(mutex_);
  const auto entry = deviceMaps_.find(to.name_);
  return entry != deviceMaps_.end() ? entry->second : DeviceMap{};
}

const std::vector<c10::Device>& UcxRpcAgent::getDevices() const {
  return devices_; // set before start(), constant afterwards
}

// ----------------------------------------------------------------------------------------------- start and end

void UcxRpcAgent::startImpl() {
  timer_.start();
  threads_->start();
}

int64_t UcxRpcAgent::activity() const {
  return static_cast<int64_t>(calls_.size()) + servedRequests_.load();
}

int64_t UcxRpcAgent::barrier(int64_t value, std::chrono::milliseconds timeout) {
  const auto deadline = timeout.count() != 0 ? CallTable::Clock::now() + timeout : kForEver;
  barrier_.enter(value);
  Barrier::Result result;
  while (!barrier_.wait(kLookUp, result)) {
    whileWaiting_();
    TORCH_CHECK(
        !isClosed_.load(), "RPC was shut down on worker '", workerInfo_.name_, "' while it waited for the others");
    if (CallTable::Clock::now() >= deadline) {
      const std::string missing = barrier_.missing();
      throw std::runtime_error(
          "worker '" + workerInfo_.name_ + "' waited " + std::to_string(timeout.count()) +
          " ms for all workers to come to the same point" + (missing.empty() ? "" : "; missing: " + missing));
    }
  }
  if (result.error) {
    throw std::runtime_error("the workers cannot all come to the same point: " + result.error.message());
  }
  return result.sum;
}

// Ends when nothing is under way anywhere: two rounds in a row in which no worker had a call open, nor opened one in between.
// (One round is not enough: a worker that has reported may still be asked for something by one that has not.)
void UcxRpcAgent::join(bool /*shutdown*/, float timeoutSeconds) { // the same either way; torch calls shutdown() itself
  const std::chrono::milliseconds timeout = toMilliseconds(timeoutSeconds);
  const auto deadline = timeout.count() != 0 ? CallTable::Clock::now() + timeout : kForEver;
  uint64_t openedBefore = ~0ull;
  for (int quietRounds = 0; quietRounds < 2;) {
    const auto left = deadline == kForEver
        ? std::chrono::milliseconds(0)
        : std::max(
              std::chrono::milliseconds(1),
              std::chrono::duration_cast<std::chrono::milliseconds>(deadline - CallTable::Clock::now()));
    while (activity() != 0 && CallTable::Clock::now() < deadline) {
      whileWaiting_();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const uint64_t opened = calls_.opened();
    const bool isQuiet = activity() == 0 && (quietRounds == 0 || opened == openedBefore);
    openedBefore = opened;
    quietRounds = barrier(isQuiet ? 0 : 1, left) == 0 ? quietRounds + 1 : 0;
  }
  isEverybodyLeaving_.store(true);
}

void UcxRpcAgent::shutdownImpl() {
  std::call_once(shutdownOnce_, [this] {
    if (!isEverybodyLeaving_.load()) {
      for (Peer* peer : directory_.present()) {
        if (peer->member().session != session_) { // also who has never heard of us: it would take our end for a crash
          postControl(*peer, wire::Kind::kGoodbye, 0, {});
        }
      }
    }
    isClosed_.store(true);
    for (CallTable::Call& call : calls_.takeAll()) {
      failCall(
          call, "RPC was shut down on worker '" + workerInfo_.name_ + "' before " + call.to->describe() + " answered");
    }
    timer_.stop();
    const size_t stuck = threads_->stop(kHandlerGrace, [this] { progress_->wake(); });
    if (stuck != 0) {
      LOG(WARNING) << "torch_ucx_rpc: " << stuck << " thread(s) of worker '" << workerInfo_.name_
                   << "' are still running user code at shutdown; they end when it returns";
    }
    progress_->close([this] {
      outbox_->close();
      transport_->close(kFlushLimitMs);
    });
  });
}

// ---------------------------------------------------------------------------------------------------- reports

void UcxRpcAgent::addGilWaitTime(std::chrono::microseconds waitTime) {
  const std::lock_guard lock(mutex_);
  gilWaitMicroseconds_ += static_cast<uint64_t>(waitTime.count());
  ++gilWaits_;
}

std::unordered_map<std::string, std::string> UcxRpcAgent::getMetrics() {
  const AgentThreads::Counts threads = threads_->counts();
  const HostPool::Statistics pool = HostPool::instance().statistics();
  uint64_t callsSent = 0;
  uint64_t bytesSent = 0;
  uint64_t bytesReceived = 0;
  for (const Peer* peer : directory_.all()) {
    callsSent += peer->callsSent.load();
    bytesSent += peer->bytesSent.load();
    bytesReceived += peer->bytesReceived.load();
  }
  std::unordered_map<std::string, std::string> metrics{
      {"agent.num_worker_threads", std::to_string(options_.numWorkerThreads)},
      {"agent.thread_pool_size", std::to_string(threads.threads)},
      {"agent.num_idle_threads", std::to_string(threads.idle)},
      {"agent.client_active_calls", std::to_string(calls_.size())},
      {"agent.server_active_calls", std::to_string(servedRequests_.load())},
      {"agent.server_active_async_calls", std::to_string(asyncRequests_.load())},
      {"agent.calls_sent", std::to_string(callsSent)},
      {"agent.calls_received", std::to_string(callsReceived_.load())},
      {"agent.calls_timed_out", std::to_string(callsTimedOut_.load())},
      {"agent.bytes_sent", std::to_string(bytesSent)},
      {"agent.bytes_received", std::to_string(bytesReceived)},
      {"agent.frames_refused", std::to_string(inbox_->refusedFrames())},
      {"pool.in_use_bytes", std::to_string(pool.inUseBytes)},
      {"pool.cached_bytes", std::to_string(pool.cachedBytes)},
      {"pool.hits", std::to_string(pool.hits)},
      {"pool.misses", std::to_string(pool.misses)},
      {"window.limit_bytes", std::to_string(window_->limitBytes())},
      {"window.in_use_bytes", std::to_string(window_->inUseBytes())},
      {"window.waiting_messages", std::to_string(window_->waitingMessages.load())},
  };
  if (isGILProfilingEnabled()) {
    const std::lock_guard lock(mutex_);
    metrics["agent.gil_average_wait_time_us"] = std::to_string(
        gilWaits_ == 0 ? 0.0 : static_cast<double>(gilWaitMicroseconds_) / static_cast<double>(gilWaits_));
  }
  return metrics;
}

std::unordered_map<std::string, std::string> UcxRpcAgent::getDebugInfo() {
  std::unordered_map<std::string, std::string> info = getMetrics();
  for (const auto& [key, value] : transport_->description()) {
    info[key] = value;
  }
  if (isClosed_.load()) {
    return info;
  }
  progress_->run([&] {
    for (const Peer* peer : directory_.all()) {
      if (!peer->endpoint.has_value()) {
        continue;
      }
      std::string lanes;
      for (const std::string& lane : transport_->lanes(*peer->endpoint)) {
        lanes += (lanes.empty() ? "" : ",") + lane;
      }
      info["lanes." + peer->member().name] = lanes;
    }
  });
  return info;
}

} // namespace torch_ucx_rpc
