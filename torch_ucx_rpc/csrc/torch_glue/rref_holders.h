#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// A reference ("fork" in torch's words) that another worker holds to an RRef of this worker.
struct HeldFork {
  torch::distributed::rpc::RRefId rref;
  torch::distributed::rpc::ForkId fork;
};

// A future that waits for the value of an RRef, and the rank of the worker that was to make the value.
struct WaitForValue {
  torch::distributed::rpc::worker_id_t creator;
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future;
};

// Records which worker holds which reference to this worker's RRefs, as far as torch's messages tell. A worker that
// dies never deletes its references, and torch would keep their values for ever.
//
// Two kinds of holders are known. The caller of rpc.remote() holds a reference that bears its rank. A worker that got a
// reference from a third worker reports to the owner. A worker that got a reference from the owner itself, in an
// argument or a result, is not known: its message is an opaque pickle, and no worker reports it. Thread-safe.
class RRefHolders {
 public:
  struct Noted {
    // The value of an RRef counts as being made until this is released. Set for rpc.remote() of a Python function.
    std::shared_ptr<void> making;
    // The request is to be handled once this value is there. See note().
    c10::intrusive_ptr<torch::distributed::rpc::JitFuture> after;
  };

  // To be called with every request before it is handled. Throws torch's error for a request that torch cannot read.
  //
  // Two kinds of rpc.remote() go unnoticed: those of TorchScript, whose arguments cannot be read twice, and those that
  // autograd or the profiler has wrapped.
  //
  // torch forgets an RRef when it deletes the last reference that it knows. It knows the reference of rpc.remote()'s
  // caller only when the value is made. Before that, calls may wait here for the value, and a third worker may report a
  // reference and delete it. torch would make a second RRef for the value, and the calls would wait for ever. So such a
  // deletion has to wait for the value.
  Noted note(torch::distributed::rpc::worker_id_t sender, const torch::distributed::rpc::Message& request);

  // Returns the references that gone workers are known to hold, and forgets what these workers have reported. To be
  // called before another worker takes their ranks.
  std::vector<HeldFork> takeHeldBy(const std::unordered_set<torch::distributed::rpc::worker_id_t>& gone);

  // Returns and forgets the waits on this worker for values that lost workers were to make with rpc.remote(), except
  // values that are being made.
  std::vector<WaitForValue> takeHopelessWaits(
      const std::function<bool(const torch::distributed::rpc::RRefId&)>& isOfLostWorker);

 private:
  using ForkId = torch::distributed::rpc::ForkId;

  using RRefId = torch::distributed::rpc::RRefId;

  struct InMaking {
    std::mutex mutex;
    std::unordered_set<RRefId, RRefId::Hash> ids; // guarded by mutex
  };
  const std::shared_ptr<InMaking> inMaking_ = std::make_shared<InMaking>();

  std::mutex mutex_;
  // Guarded by mutex_: references from third workers -> the worker that reported them.
  std::unordered_map<ForkId, torch::distributed::rpc::worker_id_t, ForkId::Hash> reported_;
};

} // namespace torch_ucx_rpc
