#pragma once

#include "peers/peer.h"
#include "base/unique_function.h"

#include <map>
#include <mutex>

namespace torch_ucx_rpc {

// Notices within milliseconds when the process of a peer on the same machine ends, however it ends. UCX does not: over
// shared memory a killed peer was not reported within 45 s. Works for processes of the same pid namespace, by pidfd.
// Thread-safe.
class ProcessWatch {
 public:
  // Must run `onReadable`, once, when the descriptor becomes readable.
  using Watch = UniqueFunction<void(int fd, UniqueFunction<void()> onReadable)>;

  explicit ProcessWatch(Watch watch) : watch_(std::move(watch)) {}
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  enum class Outcome { kWatched, kHasEnded, kNotPossible };

  // Runs `onEnd` when the process of `member` ends, unless it has ended already. Not possible: it runs on another machine or in another
  // pid namespace, or the kernel is older than Linux 5.3.
  Outcome add(const Member& member, const Member& self, UniqueFunction<void()> onEnd);

  // `onEnd` is no longer wanted, though it may be running or about to.
  void forget(const Member& member);

 private:
  Watch watch_;
  std::mutex mutex_;
  std::map<uint64_t, int> processes_; // pidfds by session; guarded by mutex_
};

} // namespace torch_ucx_rpc
