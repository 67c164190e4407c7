#pragma once

#include "base/unique_function.h"
#include "peers/peer.h"

#include <map>
#include <mutex>

namespace torch_ucx_rpc {

// Notices within milliseconds that the process of a peer on the same machine has ended, in whatever way. UCX does not:
// over shared memory it did not report a killed peer within 45 s. Watches a pidfd, so it works only for processes of
// the same pid namespace. Thread-safe.
class ProcessWatch {
 public:
  // Must run `onReadable` once, when the descriptor becomes readable.
  using Watch = UniqueFunction<void(int fd, UniqueFunction<void()> onReadable)>;

  explicit ProcessWatch(Watch watch) : watch_(std::move(watch)) {}
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  enum class Outcome { kWatched, kHasEnded, kNotPossible };

  // Runs `onEnd` when the process of `member` ends. kHasEnded: it has ended already, and `onEnd` never runs.
  // kNotPossible: it runs on another machine or in another pid namespace, or the system gives no pidfd (before Linux
  // 5.3, or without free file descriptors) or no further watch.
  Outcome add(const Member& member, const Member& self, UniqueFunction<void()> onEnd);

  // Ends a watch. `onEnd` may be running already, or about to.
  void forget(const Member& member);

 private:
  Watch watch_;
  std::mutex mutex_;
  std::map<uint64_t, int> processes_; // pidfds by session; guarded by mutex_
};

} // namespace torch_ucx_rpc
