#include "runtime/worker_mutex.h"

#include <cstdio>
#include <cstdlib>

namespace torch_ucx_rpc {

#ifdef TORCH_UCX_RPC_CHECK_LOCKS

namespace {

thread_local int held = 0; // worker locks of this thread

} // namespace

void WorkerMutex::note(int change) {
  held += change;
}

void assertHoldsWorkerLock(const char* function) {
  if (held == 0) {
    std::fprintf(stderr, "torch_ucx_rpc: %s() was called without the worker lock\n", function);
    std::abort();
  }
}

#endif

} // namespace torch_ucx_rpc
