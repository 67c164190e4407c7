#pragma once

#include <cstdint>
#include <memory>

// A forked child has this process's memory but not its threads. UCX's connections do not work in it either. If the
// child used an agent, it could hang or disturb the parent.
namespace torch_ucx_rpc {

// How many forks lie between the first process that used this file and this one. An object made at another count
// belongs to the parent. Thread-safe.
uint64_t forkCount();

// Children forked from now on never destroy the object, not even at exit. They leave the deletion of torch's
// references to RRefs to the parent. Thread-safe.
void keepInForks(std::weak_ptr<void> object);

} // namespace torch_ucx_rpc
