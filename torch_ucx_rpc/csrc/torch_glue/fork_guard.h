#pragma once

#include <cstdint>
#include <memory>

// A forked child has the memory of this process, but neither its threads nor, as far as UCX is concerned, its connections: what
// it does to an agent could hang, or disturb the parent.
namespace torch_ucx_rpc {

// How many forks lie between the first process that called keepInForks() and this one. An object that was made at another count
// belongs to the parent.
uint64_t forkCount();

// Children that are forked from now on never destroy the object, not even at exit, and leave torch's references to RRefs to the
// parent. Thread-safe.
void keepInForks(std::weak_ptr<void> object);

} // namespace torch_ucx_rpc
