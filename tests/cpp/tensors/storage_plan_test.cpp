// How the storages of a message are placed, in the body or as spans. The tensors are only descriptions.

#include "tensors/storage_plan.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Place = PlannedStorage::Place;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

class StoragePlanTest : public testing::Test {
 protected:
  static c10::Storage memory(uint64_t bytes) {
    return {c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetCPUAllocator()};
  }
  void add(
      const c10::Storage& owner,
      uint64_t offset,
      uint64_t bytes,
      uint8_t itemBytes = 1,
      c10::Device device = c10::kCPU) {
    PlannedTensor& tensor = tensors_.emplace_back();
    tensor.record.itemBytes = itemBytes;
    tensor.hasRegion = true;
    const auto* begin = static_cast<const std::byte*>(owner.data()) + offset;
    tensor.region = {device, begin, begin + bytes, owner};
  }
  static size_t count(const std::vector<PlannedStorage>& storages, Place place) {
    return static_cast<size_t>(
        std::ranges::count_if(storages, [&](const PlannedStorage& storage) { return storage.place == place; }));
  }

  std::vector<PlannedTensor> tensors_;
};

TEST_F(StoragePlanTest, RegionsThatOverlapAreOneStorage) {
  const c10::Storage owner = memory(kKiB);
  add(owner, 400, 100);
  add(owner, 0, 200);
  add(owner, 100, 200); // overlaps the second region, and not the first
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  ASSERT_EQ(storages.size(), 2u);
  EXPECT_EQ(storages[0].begin, owner.data());
  EXPECT_EQ(storages[0].bytes, 300u);
  EXPECT_EQ(storages[0].tensors, (std::vector<PlannedTensor*>{&tensors_[1], &tensors_[2]}));
  EXPECT_EQ(storages[1].bytes, 100u);
}

TEST_F(StoragePlanTest, RegionsThatOnlyTouchStayApart) {
  const c10::Storage owner = memory(kKiB);
  add(owner, 0, 100);
  add(owner, 100, 100);
  EXPECT_EQ(planStorages(tensors_).size(), 2u);
}

TEST_F(StoragePlanTest, EqualAddressesOfDifferentDevicesAreDifferentMemory) {
  const c10::Storage owner = memory(kKiB);
  add(owner, 0, 100);
  add(owner, 0, 100, 1, {c10::kCUDA, 0});
  add(owner, 0, 100, 1, {c10::kCUDA, 1});
  EXPECT_EQ(planStorages(tensors_).size(), 3u);
}

TEST_F(StoragePlanTest, TensorsAFractionOfAnElementApartGetStoragesOfTheirOwn) {
  const c10::Storage owner = memory(kKiB);
  add(owner, 0, 64, 8);
  add(owner, 4, 64, 8);
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  ASSERT_EQ(storages.size(), 2u);
  EXPECT_EQ(storages[0].bytes, 64u);
  EXPECT_EQ(storages[1].begin - storages[0].begin, 4);
}

TEST_F(StoragePlanTest, ASharedStorageBeginsWhereAllElementSizesFit) {
  const c10::Storage owner = memory(kKiB);
  add(owner, 12, 20, 4);
  add(owner, 16, 16, 8);
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  ASSERT_EQ(storages.size(), 1u);
  EXPECT_EQ(storages[0].begin - static_cast<const std::byte*>(owner.data()), 8) << "a multiple of 8 from its owner's";
}

TEST_F(StoragePlanTest, SmallStoragesAreInlineUntilTheBodyIsFull) {
  constexpr size_t kFit = kMiB / kInlineStorageBytes;
  for (size_t index = 0; index < kFit + 3; ++index) {
    add(memory(kInlineStorageBytes), 0, kInlineStorageBytes);
  }
  add(memory(kInlineStorageBytes + 1), 0, kInlineStorageBytes + 1);
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  EXPECT_EQ(count(storages, Place::kInline), kFit);
  EXPECT_EQ(count(storages, Place::kPacked), 3u);
  EXPECT_EQ(count(storages, Place::kLent), 1u);
}

TEST_F(StoragePlanTest, MemoryOfADeviceIsNeverInline) {
  add(memory(8), 0, 8, 8, {c10::kCUDA, 0});
  EXPECT_EQ(planStorages(tensors_).front().place, Place::kLent);
}

TEST_F(StoragePlanTest, SmallestStoragesBeyondTheLimitArePacked) {
  const c10::Storage owner = memory(600 * 64 * kKiB);
  for (uint64_t index = 0; index < 600; ++index) {
    add(owner, index * 64 * kKiB, kInlineStorageBytes + 1 + index);
  }
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  EXPECT_EQ(count(storages, Place::kLent), 512u);
  for (const PlannedStorage& storage : storages) {
    EXPECT_EQ(storage.place == Place::kPacked, storage.bytes <= kInlineStorageBytes + (600 - 512)) << storage.bytes;
  }
}

TEST_F(StoragePlanTest, StoragesOfAMebibyteAreNeverPacked) {
  std::vector<c10::Storage> owners;
  for (int index = 0; index < 20; ++index) {
    owners.push_back(memory(kMiB));
    add(owners.back(), 0, kMiB);
  }
  for (int index = 0; index < 512; ++index) {
    owners.push_back(memory(64 * kKiB));
    add(owners.back(), 0, 64 * kKiB);
  }
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  EXPECT_EQ(count(storages, Place::kPacked), 20u) << "small ones for which the large ones leave no room";
  EXPECT_TRUE(std::ranges::all_of(
      storages, [](const PlannedStorage& storage) { return storage.bytes < kMiB || storage.place == Place::kLent; }));
}

TEST_F(StoragePlanTest, EmptyTensorsAreStoragesWithoutBytes) {
  add(memory(0), 0, 0, 4);
  add(memory(0), 0, 0, 4);
  tensors_.emplace_back(); // undefined: no region
  const std::vector<PlannedStorage> storages = planStorages(tensors_);
  EXPECT_EQ(storages.size(), 2u);
  EXPECT_TRUE(std::ranges::all_of(storages, [](const PlannedStorage& storage) { return storage.bytes == 0; }));
}

} // namespace
} // namespace torch_ucx_rpc
