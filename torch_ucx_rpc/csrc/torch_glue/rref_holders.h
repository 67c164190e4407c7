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

// A reference, "fork" in torch's words, that a worker holds to an RRef of this one.
struct HeldFork {
  torch::distributed::rpc::RRefId rref;
  torch::distributed::rpc::ForkId fork;
};

// A future that a value is awaited with, and the rank of who was to make it.
struct WaitForValue {
  torch::distributed::rpc::worker_id_t creator;
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future;
};

// Which worker holds which reference to this worker's RRefs, as far as torch's messages tell. Who died will not delete its
// references; for those torch would keep the values for ever.
//
// Known are the caller of rpc.remote(), whose reference bears its rank, and who got a reference from a third worker, since it
// reports to the owner. Not known is who got one from the owner itself, in an argument or a result: that message is an opaque pickle, and
// nobody reports. Thread-safe.
class RRefHolders {
 public:
  // Any request, before it is handled. Throws what torch throws for one that it cannot read. For rpc.remote() of a Python function: until
  // what is returned is released, its value is being made. (That of TorchScript, whose arguments cannot be read twice, and one
  // within a context of distributed autograd, are not seen to be.)
  std::shared_ptr<void> note(
      torch::distributed::rpc::worker_id_t sender, const torch::distributed::rpc::Message& request);

  // What a worker that is gone is known to hold. Asked once: its rank may be taken by another one.
  std::vector<HeldFork> takeHeldBy(torch::distributed::rpc::worker_id_t gone);

  // Those that wait here for values which workers that are gone were to make with rpc.remote(), and that are not being made.
  std::vector<WaitForValue> takeHopelessWaits(
      const std::function<bool(const torch::distributed::rpc::RRefId&)>& isOfTheGone);

 private:
  using ForkId = torch::distributed::rpc::ForkId;

  using RRefId = torch::distributed::rpc::RRefId;

  struct InMaking {
    std::mutex mutex;
    std::unordered_set<RRefId, RRefId::Hash> ids; // guarded by mutex
  };
  const std::shared_ptr<InMaking> inMaking_ = std::make_shared<InMaking>();

  std::mutex mutex_;
  // Guarded by mutex_: references from third workers, by who reported them.
  std::unordered_map<ForkId, torch::distributed::rpc::worker_id_t, ForkId::Hash> reported_;
};

} // namespace torch_ucx_rpc
