#include "torch_glue/fork_guard.h"

#include "base/rpc_failure.h"
#include "torch_glue/torch_state.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

struct Kept {
  std::mutex mutex;
  std::vector<std::weak_ptr<void>> objects; // guarded by mutex
};

// Never destroyed: forks happen up to the end of the process.
Kept& kept() {
  static auto* const instance = new Kept(); // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

std::atomic<uint64_t> forks{0};

void inChild() {
  forks.fetch_add(1);
  for (const std::weak_ptr<void>& object : kept().objects) {
    if (std::shared_ptr<void> alive = object.lock()) {
      new std::shared_ptr<void>(std::move(alive)); // NOLINT: leaked on purpose
      stopRRefDeletions();
    }
  }
  kept().objects.clear();
  kept().mutex.unlock();
}

// The mutex is locked across a fork: no other thread of the parent changes the list while the child gets its copy.
void noticeForks() {
  static const int registered = pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, &inChild);
  (void)registered;
}

uint64_t forkCount() {
  noticeForks();
  return forks.load(std::memory_order_relaxed);
}

} // namespace

ProcessGuard::ProcessGuard(std::string worker) : worker_(std::move(worker)), forks_(forkCount()) {}

void ProcessGuard::check() const {
  if (forks_ != forkCount()) {
    throw RpcFailure(
        RpcFailure::Kind::kForked,
        "RPC cannot be used in a process that was forked from worker '" + worker_ +
            "': the agent's threads and UCX's connections stay with the parent. Let the parent call, or start the "
            "process with multiprocessing's start method spawn or forkserver and call init_rpc in it.");
  }
}

void keepInForks(std::weak_ptr<void> object) {
  noticeForks();
  const std::lock_guard lock(kept().mutex);
  std::erase_if(kept().objects, [](const std::weak_ptr<void>& other) { return other.expired(); });
  kept().objects.push_back(std::move(object));
}

} // namespace torch_ucx_rpc
