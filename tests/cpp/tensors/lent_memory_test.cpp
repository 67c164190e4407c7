#include "tensors/lent_memory.h"

#include "memory/host_pool.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr size_t kBytes = 1 << 20;

c10::Storage makeStorage(c10::Allocator* allocator, c10::DataPtr data, bool isResizable) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(kBytes), std::move(data), allocator, isResizable));
}

c10::Storage makeStorage(c10::Allocator* allocator) {
  return makeStorage(allocator, allocator->allocate(kBytes), true);
}

// Gives the storage other memory, as resize_() does.
void replaceMemory(const c10::Storage& storage) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(storage.allocator()->allocate(kBytes));
}

class LentMemoryTest : public testing::TestWithParam<bool> {
 protected:
  c10::Allocator* const allocator_ = GetParam() ? &HostPool::instance() : c10::GetCPUAllocator();
};

TEST_P(LentMemoryTest, OutlivesAResize) {
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  {
    c10::Storage storage = makeStorage(allocator_);
    std::memset(storage.mutable_data(), 7, kBytes);
    const auto* const lent = static_cast<const char*>(storage.data());
    std::optional<LentMemory> loan(LentMemory::lend(storage));
    std::optional<LentMemory> another(LentMemory::lend(storage));
    EXPECT_EQ(storage.data(), lent) << "the address stays";

    replaceMemory(storage);
    loan.reset();
    const c10::Storage next = makeStorage(allocator_);
    EXPECT_NE(storage.data(), lent);
    EXPECT_NE(next.data(), lent) << "freed too early";
    EXPECT_EQ(lent[0], 7);
    EXPECT_EQ(lent[kBytes - 1], 7);
    another.reset();

    const LentMemory ofNewMemory = LentMemory::lend(storage);
    storage = c10::Storage();
  }
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before) << "never freed";
}

TEST_P(LentMemoryTest, ManyThreadsCanLendTheSameStorage) {
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  {
    const c10::Storage storage = makeStorage(allocator_);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&storage] {
        for (int round = 0; round < 500; ++round) {
          const LentMemory loan = LentMemory::lend(storage);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_NE(storage.data(), nullptr);
  }
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before);
}

INSTANTIATE_TEST_SUITE_P(Allocators, LentMemoryTest, testing::Bool(), [](const auto& info) {
  return info.param ? "HostPool" : "Torch";
});

TEST(MemoryThatIsNotSharedTest, TheDeleterOfOtherMemoryStays) {
  // torch recognizes shared and pinned memory by its deleter.
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  const c10::Storage fixed = makeStorage(allocator, allocator->allocate(kBytes), false);
  const c10::DeleterFnPtr deleter = fixed.data_ptr().get_deleter();
  const LentMemory loan = LentMemory::lend(fixed);
  EXPECT_EQ(fixed.data_ptr().get_deleter(), deleter);

  int context = 0;
  const c10::DeleterFnPtr own = [](void*) {};
  std::vector<std::byte> memory(kBytes);
  const c10::Storage special =
      makeStorage(allocator, c10::DataPtr(memory.data(), &context, own, c10::Device(c10::kCPU)), true);
  const LentMemory specialLoan = LentMemory::lend(special);
  EXPECT_EQ(special.data_ptr().get_deleter(), own);
}

TEST(MemoryThatIsNotSharedTest, BorrowedMemoryHasNoOwner) {
  std::vector<std::byte> memory(kBytes);
  EXPECT_FALSE(isMemoryOwned(makeStorage(nullptr, c10::DataPtr(memory.data(), c10::Device(c10::kCPU)), false)));
  const c10::Storage owned = makeStorage(c10::GetCPUAllocator());
  EXPECT_TRUE(isMemoryOwned(owned));
  const LentMemory loan = LentMemory::lend(owned);
  EXPECT_TRUE(isMemoryOwned(owned));
}

} // namespace
} // namespace torch_ucx_rpc
