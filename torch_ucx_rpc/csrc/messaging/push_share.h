#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// This worker's share of what all workers together may push into another worker. A receiver cannot hold back what
// arrives unasked. So the senders divide a fixed budget among themselves, and a worker's memory stays bounded however
// many others call it. Messages beyond the share wait at their sender. Thread-safe.
class PushShare {
 public:
  // Bytes of unanswered requests whose bodies were sent at once.
  static constexpr uint64_t kBudgetBytes = 64ull * 1024 * 1024;
  // Parts that were announced and wait to be fetched. Each costs the receiver a UCX descriptor for each of its pieces,
  // which takes 8 KiB of shared memory.
  static constexpr size_t kBudgetParts = 4096;
  // The most parts for one peer, however few the senders. This many hide the latency of a network, even if each part
  // has the smallest size of a rendezvous. 64 times 32 KiB take 80 us at 25 GB/s.
  static constexpr size_t kMaxParts = 64;

  // Sets the number of workers in the group, including this one.
  void setWorkers(size_t workers) {
    senders_.store(std::max<size_t>(workers, 2) - 1, std::memory_order_relaxed);
  }

  // The share for each peer.
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
