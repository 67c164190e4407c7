#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// The share that this worker has of what all workers together may push into another one. A receiver cannot hold back
// what arrives unasked, so the senders divide a fixed budget among themselves: a worker's memory stays bounded however
// many others call it. A sender that has used up its share lets its messages wait at home. Thread-safe.
class PushShare {
 public:
  // Bodies of unanswered requests that were sent at once.
  static constexpr uint64_t kBudgetBytes = 64ull * 1024 * 1024;
  // Parts that have been announced and wait to be fetched: each costs its receiver a descriptor of UCX's, 8 KiB of
  // shared memory for each of its pieces.
  static constexpr size_t kBudgetParts = 4096;
  // To one peer, however few the senders. Enough to hide the latency of a network also where each part is as small as
  // rendezvous gets: 64 times 32 KiB are 80 us of 25 GB/s.
  static constexpr size_t kMaxParts = 64;

  // All workers of the group, this one included.
  void setWorkers(size_t workers) {
    senders_.store(std::max<size_t>(workers, 2) - 1, std::memory_order_relaxed);
  }

  // To each peer.
  uint64_t bytes() const {
    return kBudgetBytes / senders_.load(std::memory_order_relaxed);
  }
  size_t parts() const {
    return std::clamp<size_t>(kBudgetParts / senders_.load(std::memory_order_relaxed), 1, kMaxParts);
  }

 private:
  std::atomic<size_t> senders_{1};
};

} // namespace torch_ucx_rpc
