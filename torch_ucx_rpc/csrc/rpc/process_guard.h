#pragma once

#include <cstdint>
#include <string>

namespace torch_ucx_rpc {

// Tells the process of a worker's agent from those forked from it. Thread-safe.
class ProcessGuard {
 public:
  // The agent belongs to the process that makes the guard. `worker` is its name.
  explicit ProcessGuard(std::string worker);

  // Throws RpcFailure in a process that was forked from the agent's.
  void check() const;

 private:
  const std::string worker_;
  const uint64_t forkCount_; // of the agent's process
};

} // namespace torch_ucx_rpc
