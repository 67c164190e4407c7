#include "torch_glue/rref_holders.h"

#include "torch_glue/torch_state.h"

#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

RRefHolders::Noted RRefHolders::note(rpc::worker_id_t sender, const rpc::Message& request) {
  const rpc::MessageType type = request.type();
  // torch makes the RRef while the function runs. Until then only the request shows that its value is still to come.
  if (type == rpc::MessageType::PYTHON_REMOTE_CALL) {
    const auto id = RRefId::fromIValue(rpc::PythonRemoteCall::fromMessage(request)->retRRefId());
    const std::lock_guard lock(inMaking_->mutex);
    inMaking_->ids.insert(id);
    // The pointer owns nothing: its deleter is the guard.
    const std::shared_ptr<void> making(inMaking_.get(), [all = inMaking_, id](InMaking* /*all*/) {
      const std::lock_guard end(all->mutex);
      all->ids.erase(id);
    });
    return {making, nullptr};
  }
  // The id of a fork names the worker that made it. That worker passes the fork on to another worker, which reports and
  // holds it.
  if (type == rpc::MessageType::RREF_FORK_REQUEST || type == rpc::MessageType::RREF_USER_DELETE) {
    const auto [rref, fork] = rpc::ForkMessageBase::fromMessage(request, type);
    const std::lock_guard lock(mutex_);
    if (type == rpc::MessageType::RREF_FORK_REQUEST) {
      reported_.insert_or_assign(fork, sender);
    } else if (reported_.erase(fork) != 0) {
      return {nullptr, valueAwaitedWith({rref, fork})};
    }
  }
  return {};
}

std::vector<HeldFork> RRefHolders::takeHeldBy(const std::unordered_set<rpc::worker_id_t>& gone) {
  std::vector<HeldFork> held;
  const std::lock_guard lock(mutex_);
  for (const HeldFork& any : heldForks()) {
    const auto reported = reported_.find(any.fork);
    if (gone.contains(reported != reported_.end() ? reported->second : any.fork.createdOn_)) {
      held.push_back(any);
    }
  }
  std::erase_if(reported_, [&gone](const auto& entry) { return gone.contains(entry.second); });
  return held;
}

std::vector<WaitForValue> RRefHolders::takeHopelessWaits(const std::function<bool(const RRefId&)>& isOfLostWorker) {
  const std::lock_guard lock(inMaking_->mutex);
  return takeWaitsForValues(
      [&](const RRefId& id) { return isOfLostWorker(id) && inMaking_->ids.find(id) == inMaking_->ids.end(); });
}

} // namespace torch_ucx_rpc
