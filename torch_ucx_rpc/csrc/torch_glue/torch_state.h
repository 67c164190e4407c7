#pragma once

#include "torch_glue/rref_holders.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// What torch keeps for the whole life of a process, made fit for workers that come and go. torch (2.11 to 2.15) has no
// functions for it.
namespace torch_ucx_rpc {

// Whether torch's functions use this agent. torch keeps books of RRefs and contexts for one agent of a process; tests have several.
bool isTorchsAgent(const torch::distributed::rpc::RpcAgent& agent);

// torch's bookkeeping of RRefs keeps the first agent of the process, and stops when that is shut down: in every later life
// RRefs were never deleted on their owners, with any agent. To be called when an agent starts that is torch's current one.
void renewRRefContext(std::shared_ptr<torch::distributed::rpc::RpcAgent> agent);

// torch makes the ids of RRefs, and of the contexts and messages of distributed autograd, from the rank and a count that starts
// anew with the process. A worker with the rank of one that has crashed would reuse ids that other workers still know: in
// groups where that can happen the counts start at random points.

// Returns the first id of the RRefs that are made from now on. `areRandom`: see above.
int64_t beginRRefIds(bool areRandom);

// As torch.distributed.autograd._init, but the rank may be another one than in an earlier life of this process. `areIdsRandom`: see
// above.
void initAutograd(torch::distributed::rpc::worker_id_t rank, bool areIdsRandom);

// torch sends no more messages when references to RRefs are destroyed in this process. For a forked child, whose references are
// its parent's.
void stopRRefDeletions();

// The references to RRefs of this worker that torch knows of.
std::vector<HeldFork> heldForks();

// Takes those that wait here, without end, for values that other workers were to make with rpc.remote(): on a thread in
// RRef.local_value(), or with a call that is to be answered. Of them, those whose wait is hopeless.
std::vector<WaitForValue> takeWaitsForValues(const std::function<bool(const torch::distributed::rpc::RRefId&)>& isHopeless);

// Has torch refuse the use of references here to RRefs of a worker that is gone. It knows owners by their rank, which another one has by
// now: that would wait for values that it never gets.
void invalidateRRefsOf(torch::distributed::rpc::worker_id_t owner);

// The contexts of distributed autograd here that a worker has opened. Who died will not close them.
std::vector<int64_t> autogradContextsOf(torch::distributed::rpc::worker_id_t rank);

} // namespace torch_ucx_rpc
