#include "rpc/agent.h"

#include "base/time.h"
#include "base/trace.h"
#include "base/warnings.h"
#include "memory/device_pool.h"
#include "memory/host_pool.h"
#include "tensors/device_copy.h"
#include "tensors/self_copy.h"
#include "torch_glue/message_types.h"
#include "torch_glue/torch_state.h"

#include <random>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

// How long shutdown waits for running handlers, and then for the last messages to leave: less than two seconds in all.
// A peer on a busy machine may need long to answer a new connection, and without the goodbye it would take this worker
// for lost.
constexpr auto kHandlerGrace = std::chrono::milliseconds(500);
constexpr int64_t kFlushLimitMs = 1400;

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
      self_{rank, workerInfo_.name_, randomSession()},
      processGuard_(self_.name),
      lifetime_([this] { return weak_from_this().lock(); }),
      deviceMaps_(options.streamPriority, transport->deviceMemoryRefusal()),
      executor_(std::make_shared<Executor>(
          options.numWorkerThreads, options.maxWorkerThreads, std::move(threadHooks), timer_)),
      messenger_(
          std::move(transport),
          self_,
          directory_,
          deviceMaps_.devicesInUse(),
          handlers_,
          *executor_,
          timer_,
          lifetime_,
          &copyForSelf,
          Messenger::Options{options.receiveWindowBytes, options.waiting}),
      calls_(parts_, deviceMaps_, whileWaiting),
      channel_(parts_, deviceMaps_, whileWaiting),
      orphans_(parts_, *this, *cb_),
      monitor_(parts_, options.heartbeatLimit, options.reconnectLimit),
      requests_(parts_, *cb_, orphans_.holders(), deviceMaps_),
      group_(parts_, *this, calls_, monitor_, orphans_, std::move(whileWaiting)),
      reports_(parts_, options_, calls_, requests_, channel_) {
  handlers_ = {&calls_, &requests_, &monitor_, &group_, &channel_};
  HostPool::instance().setIdleLimit(options.hostPoolBytes);
  DevicePool::instance().setPinned(&allocatePinned); // memory/ must not include tensors/, which has the function
  // Calls fail first, since programs wait for them.
  monitor_.addObserver(calls_);
  monitor_.addObserver(channel_);
  monitor_.addObserver(messenger_);
  monitor_.addObserver(orphans_);
  monitor_.addObserver(group_);
}

UcxRpcAgent::~UcxRpcAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown(); // otherwise ~RpcAgent() calls it, when shutdownImpl() of this class is gone
  }
  shutdownImpl();
}

// ----------------------------------------------------------------------------------------------- start and end

void UcxRpcAgent::startImpl() {
  // torch's state first: once the executor has a thread, requests arrive.
  if (isTorchsAgent(*this)) {
    renewRRefContext(shared_from_this());
  }
  keepInForks(weak_from_this());
  timer_.start();
  executor_->start(messenger_);
}

void UcxRpcAgent::join(bool /*shutdown*/, float timeoutSeconds) { // the flag changes nothing: torch calls shutdown()
  checkProcess();
  group_.join(toMilliseconds(timeoutSeconds), getRpcTimeout());
}

void UcxRpcAgent::shutdownImpl() {
  std::call_once(shutdownOnce_, [this] {
    // Each step needs the one before it:
    // - No call begins from now on, and open ones fail. So handlers that wait for calls return.
    // - No task of the timer touches the objects that are taken down below.
    // - The threads end, and their remaining work is done here. The last answers are posted by then, and no handler
    //   takes part in a context of distributed autograd any more.
    // - Peers get the goodbye after these answers. The transport then has kFlushLimitMs to send everything.
    lifetime_.close();
    calls_.shutDown();
    channel_.shutDown();
    timer_.stop();
    const size_t stuck = executor_->stop(kHandlerGrace, [this] { messenger_.progress().wake(); });
    if (stuck != 0) {
      warn(
          std::to_string(stuck) + " thread(s) of worker '" + self_.name +
          "' are still running user code at shutdown; they end when it returns");
    }
    orphans_.closeContextsOfOthers();
    monitor_.sayGoodbye();
    messenger_.close(kFlushLimitMs);
    trace::write(self_.name);
  });
}

// ------------------------------------------------------------------------------------------------------- calls

c10::intrusive_ptr<JitFuture> UcxRpcAgent::send(
    const WorkerInfo& to, c10::intrusive_ptr<Message> message, float rpcTimeoutSeconds, const DeviceMap& deviceMap) {
  checkProcess();
  TORCH_CHECK(message->isRequest(), "UcxRpcAgent::send() takes requests only; got a message of type ", message->type());
  if (!rpcAgentRunning_.load() || lifetime_.isClosed()) {
    throw RpcFailure(
        RpcFailure::Kind::kShutDown,
        "RPC is not running on worker '" + self_.name + "': it has been shut down, so nothing can be sent to worker '" +
            to.name_ + "'",
        {.name = to.name_, .rank = to.id_});
  }
  // The caller may be a handler that will wait long, so it gives its share of the receive window back first.
  HandlingScope::releaseInnermost();
  const rpc::MessageType type = message->type();
  const auto timeout = rpcTimeoutSeconds == rpc::kUnsetRpcTimeout ? getRpcTimeout() : toMilliseconds(rpcTimeoutSeconds);
  Peer& peer = directory_.at(to.id_, to.name_);
  c10::intrusive_ptr<JitFuture> future =
      calls_.send(peer, std::move(message), timeout, deviceMap.empty() ? getDeviceMap(to) : deviceMap);
  if (isFetch(type) && !Executor::isLeader()) {
    // RRef.to_here() sends this request and then waits inside torch. Waiting here first makes Ctrl-C work, and lets the
    // caller drive its own call.
    calls_.waitDriving(*future);
  }
  return future;
}

// ---------------------------------------------------------------------------------------------------- reports

std::unordered_map<std::string, std::string> UcxRpcAgent::getMetrics() {
  checkProcess();
  return reports_.metrics(isGILProfilingEnabled());
}

std::unordered_map<std::string, std::string> UcxRpcAgent::getDebugInfo() {
  checkProcess();
  return reports_.debugInfo(isGILProfilingEnabled());
}

} // namespace torch_ucx_rpc
