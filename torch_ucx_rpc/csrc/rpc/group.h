#pragma once

#include "messaging/event_handlers.h"
#include "messaging/messenger.h"
#include "peers/barrier.h"
#include "peers/directory.h"
#include "peers/identity.h"
#include "peers/peer_observer.h"
#include "rpc/call_client.h"
#include "rpc/orphaned_state.h"
#include "rpc/peer_monitor.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

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

// The members of the group: who they are, barriers over them, and how they leave together (static groups) or come and
// go (dynamic ones). Thread-safe.
class Group final : public GroupHandler, public PeerObserver, private Barrier::Link {
 public:
  // `whileWaiting` is called now and then by threads that wait; it may throw to end the wait (Ctrl-C).
  Group(
      Identity self,
      const RpcAgent& agent,
      Directory& directory,
      Messenger& messenger,
      Executor& executor,
      const Lifetime& lifetime,
      CallClient& calls,
      PeerMonitor& monitor,
      OrphanedState& orphans,
      std::function<void()> whileWaiting);

  // Adds workers, this one included. Throws std::invalid_argument for a rank or name that is taken.
  void addMembers(std::vector<Member> members);
  // For a member that has gone without a goodbye to this worker.
  void removeMember(uint64_t session);
  // For a member that does not admit this worker. Calls to it fail, and it hears a goodbye.
  void loseMember(uint64_t session);

  // References stay valid for as long as the agent lives. Throw RpcFailure naming the workers that do exist.
  const WorkerInfo& info(const std::string& name) const;
  const WorkerInfo& info(Rank rank) const;
  // In a dynamic group, those that are there.
  std::vector<WorkerInfo> infos() const;

  // Waits until all workers present have come here, and sums a number over them. Throws RpcFailure when `timeout`
  // (0: none) runs out or a worker dies.
  int64_t barrier(int64_t value, std::chrono::milliseconds timeout);

  // Graceful end. Static groups: returns when nobody waits for an answer any more. Dynamic ones: this worker leaves,
  // when it has answered everybody. Throws RpcFailure when `timeout` (0: none) runs out or a worker dies.
  void join(std::chrono::milliseconds timeout, std::chrono::milliseconds defaultTimeout);

  // A dynamic group, one that workers join and leave as they like, needs a keeper of its list of members. Called on
  // agent threads.
  struct Membership {
    // A process wants to become a member, with what it passed to announceJoin(). Adds it, or throws.
    std::function<void(const std::string& record)> onJoin;
    // A member was lost without a goodbye.
    std::function<void(uint64_t session)> onLost;
  };
  // Before start(); makes the group a dynamic one. In a job with a secret, `joinKey` is this worker's own
  // (Member::joinKey).
  void setMembership(Membership membership, const std::string& joinKey = {});
  bool isDynamic() const {
    return membership_.onJoin != nullptr;
  }

  // Asks members, by their sessions, to admit this worker; those that were lost as if for the first time. Members that
  // are there and have not answered yet are in unacknowledged().
  void announceJoin(const std::string& record, const std::vector<uint64_t>& members);
  std::vector<WorkerInfo> unacknowledged() const;

  // Called on an agent thread for each peer that is gone, static group or dynamic, left or failed. Any time; empty: no
  // more.
  using OnGone = std::function<void(const Peer& peer)>;
  void setOnGone(OnGone onGone);

  // GroupHandler.
  void onJoin(uint64_t session, Bytes record) override;
  void onLeave(Peer& from) override;
  void onAcknowledge(Peer& from) override;
  void onBarrierArrive(Peer& from, uint64_t round, int64_t value) override;
  void onBarrierRelease(uint64_t round, Barrier::Result result) override;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  // Barrier::Link.
  void sendArrive(Peer& coordinator, uint64_t round, int64_t value) override;
  void sendRelease(Peer& to, uint64_t round, const Barrier::Result& result) override;

  const WorkerInfo& infoOf(const Peer& peer) const;
  void announce(Peer& to, wire::Kind kind, const std::string& body);
  void leave(std::chrono::milliseconds timeout);
  bool hasAnsweredAll() const;
  int64_t requestsOpen() const;

  // Constant after construction.
  const Identity self_;
  const RpcAgent& agent_;
  Directory& directory_;
  Messenger& messenger_;
  Executor& executor_;
  const Lifetime& lifetime_;
  CallClient& calls_;
  PeerMonitor& monitor_;
  OrphanedState& orphans_;
  const std::function<void()> whileWaiting_;
  Membership membership_; // set before start(), constant afterwards

  Barrier barrier_; // own synchronization

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  mutable std::unordered_map<const Peer*, std::unique_ptr<const WorkerInfo>> infos_; // made when first asked for
  std::shared_ptr<const OnGone> onGone_;
};

} // namespace torch_ucx_rpc
