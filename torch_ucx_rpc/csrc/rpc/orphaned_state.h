#pragma once

#include "peers/directory.h"
#include "peers/identity.h"
#include "peers/peer_observer.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/timer.h"
#include "torch_glue/rref_holders.h"

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <unordered_set>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::RequestCallback;
using torch::distributed::rpc::RpcAgent;

// What workers that are gone leave behind in this one, as torch keeps it: contexts of distributed autograd that they
// opened, references to RRefs of this worker, and threads that wait for values that they were to make. All of it is
// released, at their end and for a while after: handlers that still run make more of it. Does nothing for an agent that
// is not torch's current one: torch keeps one set of books a process. Thread-safe.
class OrphanedState final : public PeerObserver {
 public:
  // `isDynamic`: another worker may take the rank of one that is gone. Adds a task to the timer, so it must not have
  // started.
  OrphanedState(
      const Identity& self,
      const RpcAgent& agent,
      const RequestCallback& callback,
      const Directory& directory,
      Executor& executor,
      Timer& timer,
      const Lifetime& lifetime);

  // From now on other workers may take the ranks of those that are gone. Before start().
  void setDynamic() {
    isDynamic_ = true;
  }

  // The references that each worker holds, noted from its requests.
  RRefHolders& holders() {
    return holders_;
  }

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  using RRefId = torch::distributed::rpc::RRefId;

  using Ranks = std::unordered_set<Rank>;

  void release(const Ranks& gone);
  Timer::TimePoint releaseAgain(Timer::TimePoint now);
  // Whether an RRef that is waited for may still get its value.
  bool mayStillGetValue(const RRefId& id) const;
  void endHopelessWait(const WaitForValue& wait) const;

  const Rank self_;
  const RpcAgent& agent_;
  const RequestCallback& callback_;
  const Directory& directory_;
  Executor& executor_;
  const Lifetime& lifetime_;
  Timer::Task& releaseTask_;
  bool isDynamic_ = false; // constant after start()

  RRefHolders holders_; // own synchronization
  std::atomic<int> passesLeft_{0}; // in which references and contexts are looked for
};

} // namespace torch_ucx_rpc
