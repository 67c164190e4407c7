#pragma once

#include "peers/peer.h"
#include "rpc/agent_parts.h"
#include "torch_glue/rref_holders.h"

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <unordered_set>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::RequestCallback;
using torch::distributed::rpc::RpcAgent;

// Releases the state that gone workers leave behind in this worker's torch: contexts of distributed autograd that they
// opened, references to RRefs of this worker, and waits for values that they were to make. Does so at their end, and
// for a while afterwards, because handlers that still run add to it. Does nothing for an agent that is not torch's
// current one: torch keeps this state once for a process. Thread-safe.
class OrphanedState final : public PeerObserver, private AgentParts {
 public:
  OrphanedState(const AgentParts& parts, const RpcAgent& agent, const RequestCallback& callback);

  // From now on, other workers may take the ranks of gone workers. To be called before start().
  void setDynamic() {
    isDynamic_ = true;
  }

  // The references that each worker holds, noted from its requests.
  RRefHolders& holders() {
    return holders_;
  }

  // Closes the contexts of distributed autograd that other workers have opened. To be called at the end of this agent:
  // a later agent of this process would never learn that they are closed. No call may begin any more.
  void closeContextsOfOthers() const;

  // Releases all remaining references to RRefs of this worker, of any holder, and ends all waits for news of this
  // worker's references. For a shutdown in which a worker is gone and the living have deleted their references: torch
  // would wait for the references of gone workers, and for their news.
  void releaseReferences() const;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  using RRefId = torch::distributed::rpc::RRefId;

  using Ranks = std::unordered_set<Rank>;

  // Releases what workers of these ranks have left, and ends hopeless waits for any worker.
  void release(const Ranks& gone);
  // Timer task: releases state that handlers of dead workers have added since.
  Timer::TimePoint releaseAgain(Timer::TimePoint now);
  // Whether an RRef that a thread or a call waits for may still get its value.
  bool mayStillGetValue(const RRefId& id) const;
  void endHopelessWait(const WaitForValue& wait) const;
  // Whether the opener of a context of distributed autograd may still live to close it.
  bool mayStillBeClosed(int64_t context) const;

  const RpcAgent& agent_;
  const RequestCallback& callback_;
  Timer::Task& releaseTask_;
  bool isDynamic_ = false; // constant after start()

  RRefHolders holders_; // own synchronization
  std::atomic<int> passesLeft_{0}; // how many passes still look for references and contexts
};

} // namespace torch_ucx_rpc
