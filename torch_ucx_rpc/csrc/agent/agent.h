#pragma once

#include "agent/agent_threads.h"
#include "agent/barrier.h"
#include "agent/call_table.h"
#include "agent/directory.h"
#include "agent/heartbeat.h"
#include "agent/inbox.h"
#include "agent/outbox.h"
#include "agent/process_watch.h"
#include "agent/progress.h"
#include "agent/receive_window.h"
#include "agent/rref_holders.h"
#include "agent/statistics.h"
#include "agent/tensor_codec.h"
#include "agent/timer.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <forward_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::RequestCallback;

// What the user can choose; torch_ucx_rpc/_options.py documents each and checks it.
struct AgentOptions {
  std::chrono::milliseconds rpcTimeout{60'000};
  size_t numWorkerThreads = 16;
  size_t maxWorkerThreads = 512;
  uint64_t receiveWindowBytes = 64ull * 1024 * 1024;
  uint64_t hostPoolBytes = 256ull * 1024 * 1024; // idle memory of the process-wide HostPool
  Waiting waiting = Waiting::kAuto;
  std::chrono::milliseconds heartbeatLimit{10'000};
};

// torch's RpcAgent over a Transport. It turns messages into mail and back, keeps the table of open calls, and decides
// who runs what; how mail travels is Progress's, Outbox's and Inbox's business.
//
// Life: constructed -> members added (by Python, which exchanges them through the Store) -> start() -> join() or not ->
// shutdown(). In a dynamic group members come and go after start() too. Agent threads that are stuck in user code at shutdown keep the object alive until they return.
//
// `whileWaiting` is called now and then, and when a signal has come in, by a thread that blocks in wait(), barrier(), join() or in
// send() for an RRef's value; it may throw to end the wait (Ctrl-C).
class UcxRpcAgent : public torch::distributed::rpc::RpcAgent, public std::enable_shared_from_this<UcxRpcAgent> {
 public:
  UcxRpcAgent(
      std::string name,
      worker_id_t rank,
      std::unique_ptr<Transport> transport,
      std::unique_ptr<RequestCallback> callback,
      ThreadHooks threadHooks,
      std::function<void()> whileWaiting,
      const AgentOptions& options);
  ~UcxRpcAgent() override;

  // Members.
  const std::string& address() const {
    return transport_->address();
  }
  uint64_t session() const {
    return session_;
  }
  // Throws std::runtime_error in a process that was forked from this agent's. Everything that needs its threads or UCX does.
  void checkProcess() const;

  // Adds workers, this one included. Throws std::invalid_argument for a rank or name that is taken.
  void addMembers(std::vector<Member> members);
  // For a member that has gone without a goodbye to this worker.
  void removeMember(uint64_t session);

  // A dynamic group, one that workers join and leave as they like, needs somebody who keeps its list of members. Called on agent
  // threads.
  struct Membership {
    // A process wants to become a member, with what it passed to announceJoin(). Adds it, or throws.
    std::function<void(const std::string& record)> onJoin;
    // A member was lost without a goodbye.
    std::function<void(uint64_t session)> onLost;
  };
  // Before start(); makes the group a dynamic one. In a job with a secret, `joinKey` is this worker's own (Member::joinKey).
  void setMembership(Membership membership, const std::string& joinKey = {});
  // For a member that does not admit this worker. Calls to it fail, and it hears a goodbye.
  void loseMember(uint64_t session);
  // Asks members, by their sessions, to admit this worker; those that were lost as if for the first time. Who is there and has not
  // answered yet is in unacknowledged().
  void announceJoin(const std::string& record, const std::vector<uint64_t>& members);
  std::vector<WorkerInfo> unacknowledged() const;

  // Where tensors arrive at other workers, by their names: those of requests, and those of answers, by what each caller wants. `devices`
  // are those of this worker that are used for RPC, besides the CPU, all of one type.
  void setDeviceMaps(
      std::unordered_map<std::string, DeviceMap> deviceMaps,
      std::unordered_map<std::string, DeviceMap> reverseDeviceMaps,
      std::vector<c10::Device> devices);

  // Waits until all workers present have come here, and sums a number over them. Throws std::runtime_error when `timeout`
  // (0: none) runs out or a worker dies.
  int64_t barrier(int64_t value, std::chrono::milliseconds timeout);

  // Returns when the future is complete or the agent shuts down. The caller drives progress meanwhile, if no other caller does.
  void wait(JitFuture& future);
  // The same for a future that somebody else completes.
  void await(JitFuture& future);

  // RpcAgent.
  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      c10::intrusive_ptr<Message> message,
      float rpcTimeoutSeconds,
      const DeviceMap& deviceMap) override;
  const WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const WorkerInfo& getWorkerInfo(worker_id_t rank) const override;
  using RpcAgent::getWorkerInfo;
  std::vector<WorkerInfo> getWorkerInfos() const override;
  void join(bool shutdown, float timeoutSeconds) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;
  AgentStatistics statistics();
  std::unordered_map<std::string, std::string> getMetrics() override;
  std::unordered_map<std::string, std::string> getDebugInfo() override;
  DeviceMap getDeviceMap(const WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override {
    return *latestDevices_.load();
  }

 private:
  // All of the statistics that need no worker lock.
  AgentStatistics counters() const;
  void addGilWaitTime(std::chrono::microseconds waitTime) override;
  DeviceMap replyDeviceMap(const WorkerInfo& to) const;
  DeviceMap deviceMapIn(const std::unordered_map<std::string, DeviceMap>& deviceMaps, const WorkerInfo& to) const;

  // Outgoing.
  c10::intrusive_ptr<JitFuture> request(
      Peer& peer, c10::intrusive_ptr<Message> message, std::chrono::milliseconds timeout, const DeviceMap& deviceMap);
  void post(Peer& to, wire::Kind kind, uint64_t callId, std::unique_ptr<OutgoingMessage> message);
  void noteStaged(const OutgoingMessage& message);
  void postControl(Peer& to, wire::Kind kind, uint64_t callId, Bytes body);
  void deliverToSelf(std::unique_ptr<OutgoingMessage> message);

  // Incoming. dispatch() runs on the thread that brought them about, without the worker lock; user code runs in tasks, except that a
  // visitor completes its own call itself. Who drives also does at once what is quick; who has only submitted an operation may have
  // locks of torch's.
  struct Driver {
    Role role;
    std::optional<uint64_t> call; // the one that a visitor waits for
  };
  void dispatch(Deliveries deliveries, const std::optional<Driver>& driver = {});
  struct Answer {
    CallTable::Call call;
    IncomingMessage message;
  };
  // An answer that the driver is to complete itself is handed back.
  std::optional<Answer> onResponse(IncomingMessage message, const std::optional<Driver>& driver = {});
  void onMessage(IncomingMessage message); // any but a response
  void noteRequest(const IncomingMessage& message);
  void onControl(const IncomingMessage& message);
  // Its tensors may be used on `streams`, fresh ones.
  Error decode(IncomingMessage incoming, Streams& streams, DecodedMessage& decoded);
  void serve(IncomingMessage message);
  // Runs the request on this thread, with these streams current.
  c10::intrusive_ptr<JitFuture> handle(
      c10::intrusive_ptr<Message> request, const Streams& streams, Admission& admission) const;
  // Makes a thread for one piece of user code, and waits for it.
  void runOnOwnThread(const std::function<void()>& work) const;
  void respond(Peer& to, uint64_t callId, const JitFuture& response);
  void respondWithError(Peer& to, uint64_t callId, const std::string& what);
  // Why a request fails that cannot be taken in, as its caller reads it.
  std::string couldNotReceive(const Error& error) const;
  // Why a request is refused when all threads wait.
  std::string describeNesting() const;
  void complete(CallTable::Call call, IncomingMessage message);
  void failCall(const CallTable::Call& call, const std::string& what);
  void endCallToGone(CallTable::Call call);
  void failCallLater(CallTable::Call call, std::string what);
  void wakeVisitor();
  bool visit(const JitFuture& future);
  // Leaves the message where the caller may destroy it.
  void onSent(std::unique_ptr<OutgoingMessage>& message, bool isVisitor);
  void destroyLater(std::unique_ptr<OutgoingMessage> message);
  void onRejected(Deliveries::Rejection rejection);
  void onPeerGone(Peer& peer, Peer::State state, Error why);
  // What they held of this worker's through torch: autograd contexts and references to RRefs. Who waits for values that any who is
  // gone was to make, also where another has its rank by now, gets an error.
  void releaseHeldBy(const std::vector<const Peer*>& gone);
  // Whether an RRef that is waited for may still get its value.
  bool isValueToCome(const torch::distributed::rpc::RRefId& id) const;
  void endVainWait(const WaitForValue& wait) const;
  // Something of the dead may be in the way of messages to this worker.
  void requestRepair();
  void repairWithWorkerLock();
  // All that has come in already, also what nobody has had the time to look at.
  void takeInWithWorkerLock();
  void answerPingsWithWorkerLock();
  void checkHeartbeats();
  void sendNowWithWorkerLock(Peer& to, wire::Kind kind, uint64_t callId = 0);

  // torch keeps books of RRefs and contexts for one agent of a process; tests have several.
  bool isTorchsAgent() const;

  // Dynamic groups.
  bool isDynamic() const {
    return membership_.onJoin != nullptr;
  }
  void announce(Peer& to, wire::Kind kind, const std::string& body);
  void onJoin(Deliveries::Join join);
  void onLost(const Peer& peer);
  void onLeave(Peer& from);
  void leave(std::chrono::milliseconds timeout);

  // Called by the timer; says when it wants to be called again, as do these parts of it.
  Timer::Clock::time_point onTimer(Timer::Clock::time_point now);
  Timer::Clock::time_point collectDeviceMemory(Timer::Clock::time_point now);
  Timer::Clock::time_point expireCalls(Timer::Clock::time_point now);
  Timer::Clock::time_point checkWindow(Timer::Clock::time_point now);
  // Handlers that still run make contexts and references for a caller that has died, and others come to wait for what it had
  // promised them.
  Timer::Clock::time_point releaseLeftovers(Timer::Clock::time_point now);

  const AgentOptions options_;
  const uint64_t session_;
  const uint64_t forkCount_;
  const ThreadHooks threadHooks_;
  const std::function<void()> whileWaiting_;
  Membership membership_; // set before start(), constant afterwards

  // Own synchronization, in order of construction: what is below uses what is above.
  const std::unique_ptr<Transport> transport_;
  Directory directory_;
  CallTable calls_;
  const std::shared_ptr<ReceiveWindow> window_;
  std::unique_ptr<Outbox> outbox_; // worker lock
  std::unique_ptr<Inbox> inbox_; // worker lock
  std::unique_ptr<Progress> progress_;
  ProcessWatch processes_;
  Heartbeat heartbeat_; // worker lock
  RRefHolders rrefHolders_;
  std::shared_ptr<AgentThreads> threads_;
  Barrier barrier_;
  Timer timer_;

  std::mutex visitorMutex_; // held by the caller that visits Progress
  std::atomic<bool> isVisited_{false};
  std::atomic<bool> isClosed_{false}; // shutdown has begun
  std::atomic<bool> isEverybodyLeaving_{false}; // a graceful join has succeeded: peers that vanish now are in order
  std::once_flag shutdownOnce_;
  std::atomic<bool> isStallTimerSet_{false};
  std::atomic<bool> isDeviceTimerSet_{false};
  std::atomic<bool> isCollectionTimerSet_{false};

  std::atomic<int64_t> asyncRequests_{0}; // received and not answered yet, whose handler has returned
  std::atomic<uint64_t> callsTimedOut_{0};
  std::atomic<uint64_t> stagedBytes_{0};

  std::atomic<bool> hasHeartbeats_{false}; // some peer needs them
  std::atomic<bool> hasGone_{false}; // some peer, and nobody has taken its rank
  std::atomic<bool> isRepairWanted_{false};
  std::atomic<bool> isRepairing_{false}; // written under the worker lock

  // Timer thread only:
  Timer::Clock::time_point heartbeatDue_{};
  Timer::Clock::time_point leftoversDue_{};
  Timer::Clock::time_point repairDue_{};
  uint64_t stalledReleases_ = 0;
  Timer::Clock::time_point stalledSince_{};

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  uint64_t gilWaitMicroseconds_ = 0;
  uint64_t gilWaits_ = 0;
  std::vector<std::unique_ptr<OutgoingMessage>> sentMessages_; // to be destroyed
  bool isDestroyingSent_ = false; // a completion for that is under way
  std::unordered_map<std::string, DeviceMap> deviceMaps_;
  std::unordered_map<std::string, DeviceMap> reverseDeviceMaps_;
  std::forward_list<Devices> devices_{{}}; // the latest first; none is destroyed, getDevices() has given it out

  // Of these, what every call asks:
  std::atomic<const Devices*> latestDevices_{&devices_.front()};
  std::atomic<bool> hasDeviceMaps_{false}; // of this worker or of others for it
};

} // namespace torch_ucx_rpc
