#pragma once

#include "runtime/worker_mutex.h"

#include <mutex>

namespace torch_ucx_rpc {

// Lets a thread call functions that need the worker lock, without a Progress.
class AssumeWorkerLock {
 private:
  WorkerMutex mutex_;
  const std::lock_guard<WorkerMutex> lock_{mutex_};
};

} // namespace torch_ucx_rpc
