#include "peers/latency_histogram.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {

using Nanoseconds = LatencyHistogram::Nanoseconds;

TEST(LatencyHistogram, EveryDurationIsInTheFirstBucketThatEndsAfterIt) {
  for (size_t bucket = 0; bucket + 1 < LatencyHistogram::kBuckets; ++bucket) {
    const Nanoseconds end = LatencyHistogram::endOf(bucket);
    EXPECT_EQ(LatencyHistogram::bucketOf(end - Nanoseconds(1)), bucket) << end.count();
    EXPECT_EQ(LatencyHistogram::bucketOf(end), bucket + 1) << end.count();
  }
}

TEST(LatencyHistogram, ABucketEndsAtMostAQuarterAboveItsBeginning) {
  for (size_t bucket = 1; bucket + 1 < LatencyHistogram::kBuckets; ++bucket) {
    EXPECT_LE(4 * LatencyHistogram::endOf(bucket).count(), 5 * LatencyHistogram::endOf(bucket - 1).count()) << bucket;
  }
}

TEST(LatencyHistogram, NothingIsTooShortOrTooLong) {
  EXPECT_EQ(LatencyHistogram::bucketOf(Nanoseconds(0)), 0u);
  EXPECT_EQ(LatencyHistogram::bucketOf(std::chrono::hours(24 * 365)), LatencyHistogram::kBuckets - 1);
  EXPECT_EQ(LatencyHistogram::endOf(LatencyHistogram::kBuckets - 1), Nanoseconds::max());
}

TEST(LatencyHistogram, CountsOfAllThreadsAddUpWithoutEmptyBucketsAtTheEnd) {
  LatencyHistogram histogram;
  EXPECT_TRUE(histogram.counts().empty());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        histogram.add(std::chrono::microseconds(100));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const std::vector<uint64_t> counts = histogram.counts();
  ASSERT_EQ(counts.size(), LatencyHistogram::bucketOf(std::chrono::microseconds(100)) + 1);
  EXPECT_EQ(counts.back(), 4000u);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0ull), 4000u);
  EXPECT_EQ(histogram.sum(), std::chrono::microseconds(400'000));
}

} // namespace torch_ucx_rpc
