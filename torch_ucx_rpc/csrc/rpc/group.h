#pragma once

#include "messaging/event_handlers.h"
#include "peers/barrier.h"
#include "peers/peer.h"
#include "rpc/agent_parts.h"
#include "rpc/call_client.h"
#include "rpc/orphaned_state.h"
#include "rpc/peer_monitor.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::RpcAgent;
using torch::distributed::rpc::WorkerInfo;

// Keeps the members of the group, and runs barriers over them. In a static group all members leave together; in a
// dynamic group they come and go. Thread-safe.
class Group final : public GroupHandler, public PeerObserver, private Barrier::Link, private AgentParts {
 public:
  // Threads that wait call `whileWaiting` now and then. It may throw to end the wait (Ctrl-C).
  Group(
      const AgentParts& parts,
      const RpcAgent& agent,
      CallClient& calls,
      PeerMonitor& monitor,
      OrphanedState& orphans,
      std::function<void()> whileWaiting);

  // Adds workers. This worker itself must be in the first call. Throws std::invalid_argument for a rank, name or
  // session that is taken.
  void addMembers(std::vector<Member> members);
  // Removes a member that has gone without a goodbye to this worker.
  void removeMember(uint64_t session);

  // References stay valid for as long as the agent lives. All three throw an RpcFailure that names the existing
  // workers, if there is no such worker.
  const WorkerInfo& info(const std::string& name) const;
  const WorkerInfo& info(Rank rank) const;
  Peer& peer(const std::string& name) const {
    return directory_.at(name);
  }
  // All workers; in a dynamic group only those that are present.
  std::vector<WorkerInfo> infos() const;

  // Waits until all living workers have entered this barrier, and sums a number over them. Requests are served
  // during the wait. Throws RpcFailure when `timeout` (0: none) runs out.
  Barrier::Result barrier(int64_t value, std::chrono::milliseconds timeout);

  // Ends gracefully. In a static group, join() waits until no living worker waits for an answer any more. If workers
  // have died, it then throws an RpcFailure that names them. In a dynamic group this worker leaves, and join() returns
  // when this worker has answered all others. Throws RpcFailure when `timeout` runs out. A `timeout` of 0 means none,
  // or `defaultTimeout` in a dynamic group.
  void join(std::chrono::milliseconds timeout, std::chrono::milliseconds defaultTimeout);

  // Keeps the list of members of a dynamic group, which workers join and leave as they like. Both functions run on
  // agent threads.
  struct Membership {
    // Admits a process that wants to become a member. `record` is what it passed to announceJoin(). Adds the process,
    // or throws.
    std::function<void(const std::string& record)> onJoin;
    // Notes that a member was lost without a goodbye.
    std::function<void(uint64_t session)> onLost;
  };
  // Makes the group a dynamic one, before start(). In a job with a secret, `joinKey` is this worker's own
  // (Member::joinKey).
  void setMembership(Membership membership, const std::string& joinKey = {});
  bool isDynamic() const {
    return membership_.onJoin != nullptr;
  }

  // Asks members, named by their sessions, to admit this worker. If an endpoint fails, asks over another, until the
  // member answers or is lost. unadmitted() has the members that are there and have not answered yet.
  void announceJoin(const std::string& record, const std::vector<uint64_t>& members);
  std::vector<WorkerInfo> unadmitted() const;

  // Sets a callback for each peer that is gone, in static and dynamic groups, whether it left or failed. The callback
  // runs on an agent thread. It may be replaced at any time; an empty one ends the calls.
  using OnGone = std::function<void(const Peer& peer)>;
  void setOnGone(OnGone onGone);

  // GroupHandler.
  void onJoin(uint64_t session, Bytes record) override;
  void onLeave(Peer& from) override;
  void onAcknowledge(Peer& from) override;
  void onBarrierArrive(Peer& from, uint64_t round, const Barrier::Arrivals& arrivals) override;
  void onBarrierRelease(Peer& from, uint64_t round, const Barrier::Result& result) override;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  // Waits until `deadline`. The failure tells how long the caller has waited: `timeout`.
  Barrier::Result barrier(
      int64_t value, std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout);

  // Barrier::Link.
  bool isPresent(Rank rank) const override;
  Rank endOfRanks() const override;
  Error lost() const override;
  void sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) override;
  void sendRelease(Rank to, uint64_t round, const Barrier::Result& result) override;

  const WorkerInfo& infoOf(const Peer& peer) const;
  void onSizeChange();
  // The peers that are there and for which `done` is false.
  std::vector<WorkerInfo> without(std::atomic<bool> Peer::* done) const;
  void leave(std::chrono::milliseconds timeout);
  bool hasAnsweredAll() const;
  int64_t requestsOpen() const;

  // Constant after construction.
  const RpcAgent& agent_;
  CallClient& calls_;
  PeerMonitor& monitor_;
  OrphanedState& orphans_;
  const std::function<void()> whileWaiting_;
  Membership membership_; // set before start(), constant afterwards

  Barrier barrier_; // own synchronization

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  // Infos are made when they are first asked for.
  mutable std::unordered_map<const Peer*, std::unique_ptr<const WorkerInfo>> infos_;
  std::shared_ptr<const OnGone> onGone_;
};

} // namespace torch_ucx_rpc
