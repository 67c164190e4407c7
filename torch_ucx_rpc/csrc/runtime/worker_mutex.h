#pragma once

#include <mutex>

namespace torch_ucx_rpc {

// The worker lock: the thread that holds it may use the transport, Outbox, Inbox and everything whose name ends in
// WithWorkerLock. Many of these functions call assertHoldsWorkerLock(). In builds with TORCH_UCX_RPC_CHECK_LOCKS, which
// tools/sanitize.sh makes, it ends the process if the calling thread does not hold the lock.
class WorkerMutex {
 public:
  void lock() {
    mutex_.lock();
    note(1);
  }
  bool try_lock() {
    const bool isLocked = mutex_.try_lock();
    note(isLocked ? 1 : 0);
    return isLocked;
  }
  void unlock() {
    note(-1);
    mutex_.unlock();
  }

 private:
  static void note(int change);

  std::mutex mutex_;
};

#ifdef TORCH_UCX_RPC_CHECK_LOCKS
void assertHoldsWorkerLock(const char* function = __builtin_FUNCTION());
#else
inline void WorkerMutex::note(int /*change*/) {}
inline void assertHoldsWorkerLock(const char* /*function*/ = __builtin_FUNCTION()) {}
#endif

} // namespace torch_ucx_rpc
