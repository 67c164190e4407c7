// Construction, start and end, reports. The rest of the agent: calls of this worker are in agent_calls.cpp, those of others in
// agent_serving.cpp; what comes in is handed out in agent_deliveries.cpp; what time brings about is in agent_time.cpp; who belongs
// to the group in agent_members.cpp, and peers that fall silent or die in agent_peers.cpp.

#include "agent/agent.h"

#include "agent/fork_guard.h"
#include "agent/torch_state.h"
#include "base/time.h"
#include "base/trace.h"

#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// At shutdown: for handlers that are still running, and for what was sent last; together less than a second.
constexpr auto kHandlerGrace = std::chrono::milliseconds(500);
constexpr int64_t kFlushLimitMs = 400;

// How often a device is asked that nobody asks otherwise: of the order of what a short kernel takes.
constexpr auto kDevicePeriod = std::chrono::microseconds(50);

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
      forkCount_(forkCount()),
      threadHooks_(std::move(threadHooks)),
      whileWaiting_(std::move(whileWaiting)),
      transport_(std::move(transport)),
      window_(std::make_shared<ReceiveWindow>(
          options.receiveWindowBytes,
          [this] { progress_->submit([] {}); })), // settling, which follows, admits what waits
      processes_([this](int fd, UniqueFunction<void()> onReadable) { progress_->watch(fd, std::move(onReadable)); }),
      heartbeat_(directory_, options.heartbeatLimit),
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
  HostPool::instance().setIdleLimit(options.hostPoolBytes);
  progress_ = std::make_unique<Progress>(
      *transport_,
      [this] {
        makeContextCurrent(getDevices());
        inbox_->settle();
        outbox_->settle();
        if (inbox_->isUnsettled()) {
          progress_->settleAgain();
        }
        if ((outbox_->waitsForDevice() || inbox_->waitsForDevice()) && !isDeviceTimerSet_.exchange(true)) {
          timer_.dueBy(Timer::Clock::now() + kDevicePeriod);
        }
        if (DevicePool::instance().isCollecting() && !isCollectionTimerSet_.exchange(true)) {
          timer_.dueBy(Timer::Clock::now());
        }
        answerPingsWithWorkerLock();
        if (window_->waitingMessages.load() != 0 && !isStallTimerSet_.exchange(true)) {
          timer_.dueBy(Timer::Clock::now() + ReceiveWindow::kPatience);
        }
      },
      [this](Deliveries deliveries) { dispatch(std::move(deliveries)); },
      options.waiting);
  outbox_ = std::make_unique<Outbox>(*transport_, progress_->deliveries());
  inbox_ = std::make_unique<Inbox>(
      *transport_,
      directory_,
      *outbox_,
      window_,
      HostPool::instance(),
      session_,
      [this](const Peer& from, uint64_t callId) { return calls_.isOpen(callId, from); },
      [this]() -> const Devices& { return getDevices(); },
      progress_->deliveries());
  transport_->setListener(inbox_.get());
  threads_ = std::make_shared<AgentThreads>(
      options.numWorkerThreads,
      options.maxWorkerThreads,
      threadHooks_,
      [this] {
        Deliveries deliveries = progress_->lead([this] { return isClosed_.load(); });
        const bool isNeeded = !deliveries.empty() || isClosed_.load();
        const std::shared_ptr<UcxRpcAgent> self =
            weak_from_this().lock(); // what is done at once may outlast a shutdown
        dispatch(std::move(deliveries), Driver{Role::kLeader, std::nullopt});
        return isNeeded;
      },
      [this](AgentThreads::Clock::time_point when) { timer_.dueBy(when); });
}

UcxRpcAgent::~UcxRpcAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown(); // else ~RpcAgent would, and find shutdownImpl gone
  }
  shutdownImpl();
}

// ------------------------------------------------------------------------------------------------- device maps

void UcxRpcAgent::setDeviceMaps(
    std::unordered_map<std::string, DeviceMap> deviceMaps,
    std::unordered_map<std::string, DeviceMap> reverseDeviceMaps,
    std::vector<c10::Device> devices) {
  const std::lock_guard lock(mutex_);
  deviceMaps_ = std::move(deviceMaps);
  reverseDeviceMaps_ = std::move(reverseDeviceMaps);
  hasDeviceMaps_.store(!deviceMaps_.empty() || !reverseDeviceMaps_.empty());
  if (devices_.front() != devices) {
    devices_.push_front(std::move(devices));
    latestDevices_.store(&devices_.front());
  }
}

DeviceMap UcxRpcAgent::getDeviceMap(const WorkerInfo& to) const {
  return deviceMapIn(deviceMaps_, to);
}

DeviceMap UcxRpcAgent::replyDeviceMap(const WorkerInfo& to) const {
  return deviceMapIn(reverseDeviceMaps_, to);
}

DeviceMap UcxRpcAgent::deviceMapIn(
    const std::unordered_map<std::string, DeviceMap>& deviceMaps, const WorkerInfo& to) const {
  if (!hasDeviceMaps_.load()) {
    return {};
  }
  const std::lock_guard lock(mutex_);
  const auto entry = deviceMaps.find(to.name_);
  return entry != deviceMaps.end() ? entry->second : DeviceMap{};
}

// ----------------------------------------------------------------------------------------------- start and end

void UcxRpcAgent::startImpl() {
  if (isTorchsAgent()) {
    renewRRefContext(shared_from_this());
  }
  keepInForks(weak_from_this());
  timer_.start();
  threads_->start();
}

bool UcxRpcAgent::isTorchsAgent() const {
  return isCurrentRpcAgentSet() && getCurrentRpcAgent().get() == this;
}

void UcxRpcAgent::checkProcess() const {
  if (forkCount_ != forkCount()) {
    throw std::runtime_error(
        "RPC cannot be used in a process that was forked from worker '" + workerInfo_.name_ +
        "': the agent's threads and UCX's connections stay with the parent. Let the parent call, or start the process with "
        "multiprocessing's start method spawn or forkserver and call init_rpc in it.");
  }
}

void UcxRpcAgent::shutdownImpl() {
  std::call_once(shutdownOnce_, [this] {
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
    // After the answers of those that have ended: who hears it awaits none any more.
    if (!isEverybodyLeaving_.load()) {
      // Also to those who have never heard of us: they would take our end for a crash.
      for (Peer* peer : directory_.all()) {
        if (peer->isThere() && peer->member().session != session_) {
          postControl(*peer, wire::Kind::kGoodbye, 0, {});
        }
      }
    }
    progress_->close([this] {
      outbox_->close();
      inbox_->close();
      transport_->close(kFlushLimitMs);
    });
    trace::write(workerInfo_.name_);
  });
}

// ---------------------------------------------------------------------------------------------------- reports

void UcxRpcAgent::addGilWaitTime(std::chrono::microseconds waitTime) {
  const std::lock_guard lock(mutex_);
  gilWaitMicroseconds_ += static_cast<uint64_t>(waitTime.count());
  ++gilWaits_;
}

AgentStatistics UcxRpcAgent::counters() const {
  AgentStatistics statistics{};
  for (const Peer* peer : directory_.all()) {
    AgentStatistics::OfPeer of{};
    of.peer = peer;
    of.state = peer->state();
    of.callsSent = peer->callsSent.load();
    of.callsFailed = peer->callsFailed.load();
    of.callsReceived = peer->callsReceived.load();
    statistics.requestsOpen += static_cast<uint64_t>(peer->requestsOpen.load());
    of.bytesSent = peer->bytesSent.load();
    of.bytesReceived = peer->bytesReceived.load();
    of.latencyCounts = peer->latencies.counts();
    of.latencySum = peer->latencies.sum();
    statistics.peers.push_back(std::move(of));
  }
  statistics.threads = threads_->counts();
  statistics.callsOpen = calls_.size();
  statistics.callsTimedOut = callsTimedOut_.load();
  statistics.framesRefused = inbox_->refusedFrames();
  statistics.pool = HostPool::instance().statistics();
  statistics.devicePool = DevicePool::instance().statistics();
  statistics.stagedBytes = stagedBytes_.load();
  statistics.windowLimitBytes = window_->limitBytes();
  statistics.windowInUseBytes = window_->inUseBytes();
  statistics.windowWaitingMessages = window_->waitingMessages.load();
  return statistics;
}

AgentStatistics UcxRpcAgent::statistics() {
  AgentStatistics statistics = counters();
  if (!isClosed_.load()) {
    progress_->run([&] {
      statistics.messagesSending = outbox_->underWay();
      for (AgentStatistics::OfPeer& of : statistics.peers) {
        if (of.peer->endpoint.has_value()) {
          of.lanes = transport_->lanes(*of.peer->endpoint);
        }
      }
    });
  }
  return statistics;
}

std::unordered_map<std::string, std::string> UcxRpcAgent::getMetrics() {
  checkProcess();
  const AgentStatistics now = counters();
  uint64_t callsSent = 0;
  uint64_t callsReceived = 0;
  uint64_t bytesSent = 0;
  uint64_t bytesReceived = 0;
  for (const AgentStatistics::OfPeer& of : now.peers) {
    callsSent += of.callsSent;
    callsReceived += of.callsReceived;
    bytesSent += of.bytesSent;
    bytesReceived += of.bytesReceived;
  }
  std::unordered_map<std::string, std::string> metrics{
      {"agent.num_worker_threads", std::to_string(options_.numWorkerThreads)},
      {"agent.thread_pool_size", std::to_string(options_.numWorkerThreads)}, // torch's name for it
      {"agent.num_threads", std::to_string(now.threads.threads)},
      {"agent.num_idle_threads", std::to_string(now.threads.idle)},
      {"agent.max_worker_threads", std::to_string(options_.maxWorkerThreads)},
      {"agent.running_requests", std::to_string(now.threads.runningRequests)},
      {"agent.nesting_requests", std::to_string(now.threads.nestingRequests)},
      {"agent.waiting_requests", std::to_string(now.threads.waitingRequests)},
      {"agent.client_active_calls", std::to_string(now.callsOpen)},
      {"agent.server_active_calls", std::to_string(now.requestsOpen)},
      {"agent.server_active_async_calls", std::to_string(asyncRequests_.load())},
      {"agent.calls_sent", std::to_string(callsSent)},
      {"agent.calls_received", std::to_string(callsReceived)},
      {"agent.calls_timed_out", std::to_string(now.callsTimedOut)},
      {"agent.bytes_sent", std::to_string(bytesSent)},
      {"agent.bytes_received", std::to_string(bytesReceived)},
      {"agent.frames_refused", std::to_string(now.framesRefused)},
      {"pool.in_use_bytes", std::to_string(now.pool.inUseBytes)},
      {"pool.cached_bytes", std::to_string(now.pool.cachedBytes)},
      {"pool.hits", std::to_string(now.pool.hits)},
      {"pool.misses", std::to_string(now.pool.misses)},
      {"device_pool.in_use_bytes", std::to_string(now.devicePool.inUseBytes)},
      {"device_pool.held_bytes", std::to_string(now.devicePool.heldBytes)},
      {"device_pool.staged_bytes", std::to_string(now.stagedBytes)},
      {"window.limit_bytes", std::to_string(now.windowLimitBytes)},
      {"window.in_use_bytes", std::to_string(now.windowInUseBytes)},
      {"window.waiting_messages", std::to_string(now.windowWaitingMessages)},
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
  for (const AgentStatistics::OfPeer& of : statistics().peers) {
    if (!of.lanes.empty()) {
      info["lanes." + of.peer->member().name] = c10::Join(",", of.lanes);
    }
  }
  return info;
}

} // namespace torch_ucx_rpc
