#pragma once

#include "wire/body.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ucx_rpc {

// A storage up to this size travels in the body: one more copy on each side costs less than a rendezvous.
constexpr uint64_t kInlineStorageBytes = 32 * 1024;

// The memory that one strided tensor reaches.
struct Region {
  c10::Device device = c10::kCPU;
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  c10::Storage owner; // of the memory

  const std::byte* ownersBegin() const {
    return static_cast<const std::byte*>(owner.data());
  }
};

// A tensor of the message. Its record names a storage once all storages are known.
struct PlannedTensor {
  wire::TensorRecord record{};
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool isChild = false;
  bool hasRegion = false;
  Region region;
};

// A storage of the message: memory that one tensor reaches, or several tensors that share it.
struct PlannedStorage {
  // In the body, in a span with others, or as a span of its own.
  enum class Place : uint8_t { kInline, kPacked, kLent };

  c10::Device device = c10::kCPU;
  const std::byte* begin = nullptr;
  uint64_t bytes = 0;
  std::vector<PlannedTensor*> tensors;
  Place place = Place::kLent;
};

// The storages of a message: which memory of its tensors travels, and how. Regions that overlap become one storage, so
// that tensors which share memory still share it after arrival. The result points into `tensors`.
//
// The plan bounds the body: its inline storages have at most 1 MiB together. It also bounds the number of spans. Each
// storage of a device, and each other storage from 1 MiB on, has its own span. A smaller one has its own span only
// above kInlineStorageBytes, and if at most 512 storages of the CPU have one. Storages that have no span of their own
// and are not inline share spans.
std::vector<PlannedStorage> planStorages(std::vector<PlannedTensor>& tensors);

} // namespace torch_ucx_rpc
