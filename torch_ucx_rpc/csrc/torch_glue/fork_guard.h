#pragma once

#include <cstdint>
#include <memory>
#include <string>

// A forked child has this process's memory but not its threads. UCX's connections do not work in it either. If the
// child used an agent, it could hang or disturb the parent.
namespace torch_ucx_rpc {

// Distinguishes the process of a worker's agent from processes forked from it. Thread-safe.
class ProcessGuard {
 public:
  // The agent belongs to the process that makes the guard. `worker` is its name.
  explicit ProcessGuard(std::string worker);

  // Throws RpcFailure in a process that was forked from the agent's process.
  void check() const;

 private:
  const std::string worker_;
  const uint64_t forks_; // forks between the first process that used this file and the agent's process
};

// Children forked from now on never destroy the object, not even at exit. They leave the deletion of torch's
// references to RRefs to the parent. Thread-safe.
void keepInForks(std::weak_ptr<void> object);

} // namespace torch_ucx_rpc
