#include "rpc/process_guard.h"

#include "base/rpc_failure.h"
#include "torch_glue/fork_guard.h"

#include <utility>

namespace torch_ucx_rpc {

ProcessGuard::ProcessGuard(std::string worker) : worker_(std::move(worker)), forkCount_(forkCount()) {}

void ProcessGuard::check() const {
  if (forkCount_ != forkCount()) {
    throw RpcFailure(
        RpcFailure::Kind::kForked,
        "RPC cannot be used in a process that was forked from worker '" + worker_ +
            "': the agent's threads and UCX's connections stay with the parent. Let the parent call, or start the "
            "process with multiprocessing's start method spawn or forkserver and call init_rpc in it.");
  }
}

} // namespace torch_ucx_rpc
