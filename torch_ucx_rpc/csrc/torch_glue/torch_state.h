#pragma once

#include "torch_glue/rref_holders.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

// torch keeps some state for the whole life of a process. These functions make it fit for workers that come and go.
// torch (2.11 to 2.15) has no functions for that.
namespace torch_ucx_rpc {

// Whether torch's functions use this agent. torch tracks RRefs and contexts for one agent of a process; tests have
// several agents.
bool isTorchsAgent(const torch::distributed::rpc::RpcAgent& agent);

// torch's RRef context keeps the first agent of the process, and stops when that agent shuts down. After that, owners
// in this process would never delete RRefs, even with another agent. To be called when torch's current agent starts.
void renewRRefContext(std::shared_ptr<torch::distributed::rpc::RpcAgent> agent);

// torch makes the ids of RRefs, and of the contexts and messages of distributed autograd, from the rank and a count.
// The count starts again with each process. A worker that takes the rank of a crashed one would reuse ids that other
// workers still know. In groups where that can happen, the counts start at random points.

// Returns the first id of the RRefs made from now on. For `areRandom` see above.
int64_t beginRRefIds(bool areRandom);

// Like torch.distributed.autograd._init, but the rank may differ from an earlier life of this process. Returns the
// first id of the contexts opened from now on, as contextNumber() returns it. For `areRandom` see above.
int64_t beginContextIds(torch::distributed::rpc::worker_id_t rank, bool areRandom);

// The two parts of a context's id: the rank of the worker that has opened it, and that worker's count.
torch::distributed::rpc::worker_id_t contextRank(int64_t id);
int64_t contextNumber(int64_t id);

// From now on torch sends no messages when references to RRefs are destroyed in this process. For a forked child,
// whose references belong to its parent.
void stopRRefDeletions();

// The references to RRefs of this worker that torch knows.
std::vector<HeldFork> heldForks();

// The future of an RRef's value, if the value is not there and torch knows this reference only. Null otherwise.
c10::intrusive_ptr<torch::distributed::rpc::JitFuture> valueAwaitedWith(const HeldFork& only);

// Undoes the pickling of an RRef whose message was never sent: no receiver will report the reference `fork`. Returns
// the RRef if it is this worker's and torch has forgotten it, otherwise null. The value may be a Python object, so
// destroy the RRef with the GIL. To be called without the GIL: torch may send a deletion.
c10::intrusive_ptr<torch::distributed::rpc::RRef> takeBackFork(const torch::distributed::rpc::RRefForkData& fork);

// torch's shutdown waits for two kinds of news of references: that a worker has received one which this worker passed
// on, and that an owner has made the RRef of rpc.remote(). The first never comes from a worker that is gone. For the
// second torch waits even if rpc.remote() has failed. This function ends all waits of the first kind, and those of the
// second whose rpc.remote() has failed. It is for a shutdown in which no living worker owes news. To be called without
// the GIL: torch then sends deletions.
void endWaitsForReferences();

// Returns and forgets endless waits on this worker for values that other workers were to make with rpc.remote(), if
// `isHopeless` is true for the RRef. A wait is a thread in RRef.local_value(), or an unanswered request for the value.
std::vector<WaitForValue> takeWaitsForValues(
    const std::function<bool(const torch::distributed::rpc::RRefId&)>& isHopeless);

// Makes torch raise an error for any use here of references to RRefs of a lost worker. torch knows owners by rank, and
// another worker may have the rank by now: a call to it would wait for ever.
void invalidateRRefsOf(torch::distributed::rpc::worker_id_t owner);

// torch marks an RRef whose rpc.remote() has timed out. But RRef::handleError() keeps `this` in a static variable. So
// torch always marks the RRef whose rpc.remote() was the first to fail in this process, even after the RRef's
// destruction. This function makes torch mark an RRef that lives as long as the process. To be called before
// rpc.remote().
void keepRRefThatTorchMarks();

// An RRef that rpc.remote() has made on this worker, and this worker's reference to it.
struct CreatedRRef {
  c10::intrusive_ptr<torch::distributed::rpc::RRef> rref;
  torch::distributed::rpc::ForkId reference;
};

// Finds the RRef with which torch has registered this future, the future of the request that makes the RRef. Nothing if
// torch does not know the RRef: the thread that makes it tells torch after RpcAgent::send().
std::optional<CreatedRRef> findCreatedRRef(const torch::distributed::rpc::JitFuture& creation);

// Marks the RRef whose rpc.remote() is about to fail, because it timed out, and returns this worker's reference to it.
// Nothing if torch does not know the RRef, as above.
std::optional<torch::distributed::rpc::ForkId> markTimedOutRRef(const torch::distributed::rpc::JitFuture& creation);

// When rpc.remote() to this worker itself has timed out, torch deletes its reference to the RRef, and forgets the RRef
// if that was the last one. Then the function's value does not reach the RRef, unless the function has returned a
// future. This function ends the waits for the value of such a forgotten RRef with the failure. A later value is
// dropped. To be called after the call's future has failed, where callbacks may run Python.
void failIfForgotten(const CreatedRRef& own, const std::exception_ptr& why);

// The contexts of distributed autograd here that are orphans: their openers will not close them.
std::vector<int64_t> orphanedContexts(const std::function<bool(int64_t id)>& isOrphan);

} // namespace torch_ucx_rpc
