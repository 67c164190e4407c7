#include "memory/host_pool.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;

TEST(HostPoolTest, BlockSizesAreFourToAPowerOfTwo) {
  EXPECT_EQ(HostPool::blockBytes(64 * kKiB), 64 * kKiB);
  EXPECT_EQ(HostPool::blockBytes(64 * kKiB + 1), 80 * kKiB);
  EXPECT_EQ(HostPool::blockBytes(100 * kKiB), 112 * kKiB);
  EXPECT_EQ(HostPool::blockBytes(128 * kKiB), 128 * kKiB);
  EXPECT_EQ(HostPool::blockBytes(2 * kMiB), 2 * kMiB);
  EXPECT_EQ(HostPool::blockBytes(2 * kMiB + 1), 4 * kMiB); // whole huge pages
  for (size_t bytes = 64 * kKiB; bytes < 2 * kMiB; bytes += 4093) {
    const size_t block = HostPool::blockBytes(bytes);
    EXPECT_GE(block, bytes);
    if (block < HostPool::kHugePageBytes) {
      EXPECT_LE((block - bytes) * 5, block) << bytes; // at most a fifth is slack
    }
  }
}

TEST(HostPoolTest, ReturnedBlockIsUsedAgain) {
  HostPool pool(64 * kMiB);
  void* first = nullptr;
  {
    const c10::DataPtr data = pool.allocate(kMiB);
    first = data.get();
    std::memset(first, 1, kMiB);
  }
  const c10::DataPtr again = pool.allocate(kMiB - 10); // a block of the same class
  EXPECT_EQ(again.get(), first);
  const HostPool::Statistics statistics = pool.statistics();
  EXPECT_EQ(statistics.hits, 1u);
  EXPECT_EQ(statistics.misses, 1u);
}

TEST(HostPoolTest, MostRecentlyReturnedBlockIsUsedFirst) {
  HostPool pool(64 * kMiB);
  c10::DataPtr a = pool.allocate(kMiB);
  c10::DataPtr b = pool.allocate(kMiB);
  void* const warm = a.get();
  b.clear();
  a.clear();
  EXPECT_EQ(pool.allocate(kMiB).get(), warm);
}

TEST(HostPoolTest, StatisticsAddUp) {
  HostPool pool(64 * kMiB);
  c10::DataPtr a = pool.allocate(kMiB);
  c10::DataPtr b = pool.allocate(3 * kMiB);
  EXPECT_EQ(pool.statistics().inUseBytes, kMiB + 4 * kMiB);
  EXPECT_EQ(pool.statistics().cachedBytes, 0u);
  a.clear();
  EXPECT_EQ(pool.statistics().inUseBytes, 4 * kMiB);
  EXPECT_EQ(pool.statistics().cachedBytes, kMiB);
  b.clear();
  EXPECT_EQ(pool.statistics().inUseBytes, 0u);
  EXPECT_EQ(pool.statistics().cachedBytes, 5 * kMiB);
}

TEST(HostPoolTest, IdleBytesNeverExceedTheLimit) {
  HostPool pool(4 * kMiB);
  std::vector<c10::DataPtr> blocks;
  for (int count = 0; count < 10; ++count) {
    blocks.push_back(pool.allocate(kMiB));
  }
  for (c10::DataPtr& block : blocks) {
    block.clear();
    EXPECT_LE(pool.statistics().cachedBytes, 4 * kMiB);
  }
  EXPECT_EQ(pool.statistics().cachedBytes, 4 * kMiB);
}

TEST(HostPoolTest, LeastRecentlyReturnedBlockIsFreedFirst) {
  HostPool pool(3 * kMiB);
  c10::DataPtr old = pool.allocate(kMiB);
  c10::DataPtr middle = pool.allocate(kMiB + 256 * kKiB);
  c10::DataPtr young = pool.allocate(kMiB + 512 * kKiB);
  old.clear();
  middle.clear();
  young.clear(); // 3.75 MiB: the oldest block goes
  EXPECT_EQ(pool.statistics().cachedBytes, 2 * kMiB + 768 * kKiB);
  const uint64_t hits = pool.statistics().hits;
  (void)pool.allocate(kMiB + 512 * kKiB);
  (void)pool.allocate(kMiB + 256 * kKiB);
  EXPECT_EQ(pool.statistics().hits, hits + 2);
  (void)pool.allocate(kMiB);
  EXPECT_EQ(pool.statistics().hits, hits + 2);
}

TEST(HostPoolTest, LoweredLimitTakesEffectAtOnce) {
  HostPool pool(64 * kMiB);
  { // three blocks are in use at a time
    const c10::DataPtr a = pool.allocate(kMiB);
    const c10::DataPtr b = pool.allocate(kMiB);
    const c10::DataPtr c = pool.allocate(kMiB);
  }
  EXPECT_EQ(pool.statistics().cachedBytes, 3 * kMiB);
  pool.setIdleLimit(kMiB);
  EXPECT_EQ(pool.statistics().cachedBytes, kMiB);
  pool.setIdleLimit(0);
  EXPECT_EQ(pool.statistics().cachedBytes, 0u);
}

TEST(HostPoolTest, SmallRequestsAreNotPooled) {
  HostPool pool(64 * kMiB);
  {
    const c10::DataPtr data = pool.allocate(HostPool::kMinBlockBytes - 1);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data.get()) % 64, 0u);
    std::memset(data.get(), 1, HostPool::kMinBlockBytes - 1);
  }
  const HostPool::Statistics statistics = pool.statistics();
  EXPECT_EQ(statistics.inUseBytes + statistics.cachedBytes + statistics.hits + statistics.misses, 0u);
}

TEST(HostPoolTest, ZeroBytesNeedNoAllocation) {
  HostPool pool(64 * kMiB);
  EXPECT_EQ(pool.allocate(0).get(), nullptr);
}

TEST(HostPoolTest, LargeBlocksAreAlignedForHugePages) {
  HostPool pool(0);
  for (const size_t bytes : {2 * kMiB, 3 * kMiB, 10 * kMiB + 1}) {
    const c10::DataPtr data = pool.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data.get()) % HostPool::kHugePageBytes, 0u) << bytes;
    std::memset(data.get(), 1, bytes); // the whole block is usable
  }
}

TEST(HostPoolTest, ImpossibleSizesThrowAndAreNotCounted) {
  HostPool pool(64 * kMiB);
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  for (const size_t bytes : {kMost, kMost - kMiB, kMost - 4 * kMiB, kMost / 2, kMost / 2 + 2, kMost / 8 * 7 + 1}) {
    EXPECT_THROW((void)pool.allocate(bytes), std::bad_alloc) << bytes;
  }
  EXPECT_EQ(pool.statistics().inUseBytes, 0u);
  (void)pool.allocate(kMiB); // the pool still works
}

TEST(HostPoolTest, ThreadsNeverShareABlock) {
  HostPool pool(16 * kMiB);
  constexpr int kThreads = 8;
  std::atomic<bool> isSpoilt{false};
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(static_cast<unsigned>(id));
      struct Held {
        c10::DataPtr data;
        size_t bytes;
        unsigned char mark;
      };
      std::vector<Held> held;
      for (int step = 0; step < 2000; ++step) {
        if (held.size() < 4 && random() % 2 == 0) {
          const size_t bytes = 64 * kKiB + random() % (256 * kKiB);
          Held fresh{pool.allocate(bytes), bytes, static_cast<unsigned char>(random())};
          auto* const begin = static_cast<unsigned char*>(fresh.data.get());
          begin[0] = fresh.mark;
          begin[bytes - 1] = fresh.mark;
          held.push_back(std::move(fresh));
        } else if (!held.empty()) {
          std::swap(held[random() % held.size()], held.back());
          const Held& last = held.back();
          const auto* const begin = static_cast<unsigned char*>(last.data.get());
          if (begin[0] != last.mark || begin[last.bytes - 1] != last.mark) {
            isSpoilt.store(true);
          }
          held.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_FALSE(isSpoilt.load());
  const HostPool::Statistics statistics = pool.statistics();
  EXPECT_EQ(statistics.inUseBytes, 0u);
  EXPECT_LE(statistics.cachedBytes, 16 * kMiB);
  EXPECT_GT(statistics.hits, statistics.misses);
}

torch::Tensor tensorIn(HostPool& pool, int64_t elements) {
  const auto bytes = static_cast<size_t>(elements) * sizeof(float);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), pool.allocate(bytes), &pool, true);
  torch::Tensor tensor = torch::empty({0}, torch::kFloat);
  tensor.set_(c10::Storage(std::move(storage)), 0, {elements}, {1});
  return tensor;
}

TEST(HostPoolTest, TensorInABlockCanBeResized) {
  HostPool pool(64 * kMiB);
  {
    torch::Tensor tensor = tensorIn(pool, 100'000);
    tensor.fill_(3);
    tensor.resize_({1'000'000});
    EXPECT_TRUE(tensor.narrow(0, 0, 100'000).eq(3).all().item<bool>());
    tensor.fill_(4);
    EXPECT_EQ(pool.statistics().inUseBytes, HostPool::blockBytes(4'000'000)); // the pool served it
    tensor.resize_({10});
    EXPECT_TRUE(tensor.eq(4).all().item<bool>());
  }
  EXPECT_EQ(pool.statistics().inUseBytes, 0u);
}

TEST(HostPoolTest, TensorOutlivesItsNeighbours) {
  HostPool pool(0); // returned memory is unmapped at once
  torch::Tensor kept;
  {
    const torch::Tensor before = tensorIn(pool, 500'000).fill_(1);
    kept = tensorIn(pool, 500'000).fill_(2);
    const torch::Tensor after = tensorIn(pool, 500'000).fill_(3);
  }
  EXPECT_TRUE(kept.eq(2).all().item<bool>());
  kept = torch::Tensor();
  EXPECT_EQ(pool.statistics().inUseBytes, 0u);
}

} // namespace
} // namespace torch_ucx_rpc
