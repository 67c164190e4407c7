#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ucx_rpc {

// How long calls took: counts in buckets, four to a power of two, so that a percentile read from them is at most a quarter too
// high. Thread-safe without a lock; what is read while others count is of a moment that is not quite the same for all buckets.
class LatencyHistogram {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  void add(Nanoseconds latency) {
    counts_[bucketOf(latency)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(latency.count(), std::memory_order_relaxed);
  }

  // By bucket, without the empty ones at the end.
  std::vector<uint64_t> counts() const {
    std::vector<uint64_t> counts;
    for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
      if (const uint64_t count = counts_[bucket].load(std::memory_order_relaxed); count != 0) {
        counts.resize(bucket + 1);
        counts[bucket] = count;
      }
    }
    return counts;
  }
  Nanoseconds sum() const {
    return Nanoseconds(sum_.load(std::memory_order_relaxed));
  }

  // Up to 2^36 ns, 69 s, in quarters of powers of two; the last bucket has what took longer.
  static constexpr size_t kBuckets = 4 * 26 + 1;

  // What is in a bucket took less than this, and no less than the end of the one before. The first ends at 1.3 us.
  static constexpr Nanoseconds endOf(size_t bucket) {
    if (bucket + 1 >= kBuckets) {
      return Nanoseconds::max();
    }
    return Nanoseconds(static_cast<int64_t>(5 + bucket % 4) << (kUnitBits + bucket / 4));
  }

  static constexpr size_t bucketOf(Nanoseconds latency) {
    const uint64_t units = static_cast<uint64_t>(latency.count()) >> kUnitBits;
    if (units < 4) {
      return 0;
    }
    // The highest bit says which power of two, the two below it which quarter.
    const auto power = static_cast<size_t>(std::bit_width(units)) - 3;
    const size_t bucket = 4 * power + ((units >> power) & 3);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }

 private:
  static constexpr int kUnitBits = 8; // 256 ns, a quarter of the first power of two that is divided

  std::array<std::atomic<uint64_t>, kBuckets> counts_{};
  std::atomic<int64_t> sum_{0};
};

} // namespace torch_ucx_rpc
