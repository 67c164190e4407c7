#include "tensors/storage_plan.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// The limit for all inline storages of a message together. A body is one frame, and all other frames wait for its end.
// Small storages beyond this limit are packed into spans, which travel in pieces.
constexpr uint64_t kMaxInlineBytes = 1024 * 1024;
// A message lends up to this many storages of the CPU, each as a span of its own. Beyond that it packs the smallest of
// them: a span costs the receiver about 8 KiB, whatever its size.
constexpr size_t kMaxLentStorages = 512;
// Storages of at least this size are never packed. A copy of them would cost more than their span.
constexpr uint64_t kPackableBytes = 1024 * 1024;

// Adds one storage for tensors that overlap, which are sorted by address. Each tensor must begin a whole number of its
// elements after the start of the storage.
void addShared(std::span<PlannedTensor* const> tensors, std::vector<PlannedStorage>& storages) {
  const Region& lowest = tensors.front()->region;
  uint64_t unit = 1;
  for (const PlannedTensor* tensor : tensors) {
    unit = std::lcm(unit, uint64_t{tensor->record.itemBytes});
  }
  // torch counts elements from the start of its own storage. So a start that is a multiple of all element sizes from
  // there suits all tensors.
  const bool isEmpty = lowest.begin == lowest.end; // then it has no address, and is alone
  const auto fromOwner = isEmpty ? 0 : static_cast<uint64_t>(lowest.begin - lowest.ownersBegin());
  const std::byte* const begin = lowest.begin - fromOwner % unit;
  const std::byte* end = begin;
  PlannedStorage shared{lowest.device, begin, 0, {}};
  std::vector<PlannedStorage> alone;
  for (PlannedTensor* tensor : tensors) {
    const Region& region = tensor->region;
    if ((region.begin - begin) % tensor->record.itemBytes == 0) {
      shared.tensors.push_back(tensor);
      end = std::max(end, region.end);
    } else { // two torch storages over the same memory, a fraction of an element apart
      alone.push_back({region.device, region.begin, static_cast<uint64_t>(region.end - region.begin), {tensor}});
    }
  }
  shared.bytes = static_cast<uint64_t>(end - begin);
  storages.push_back(std::move(shared));
  std::move(alone.begin(), alone.end(), std::back_inserter(storages));
}

// Addresses tell which regions belong together: live tensors overlap only where they share memory.
std::vector<PlannedStorage> joined(std::vector<PlannedTensor>& tensors) {
  std::vector<PlannedTensor*> byAddress;
  for (PlannedTensor& tensor : tensors) {
    if (tensor.hasRegion) {
      byAddress.push_back(&tensor);
    }
  }
  // Addresses of different devices have nothing to do with each other.
  std::stable_sort(byAddress.begin(), byAddress.end(), [](const PlannedTensor* a, const PlannedTensor* b) {
    const auto key = [](const Region& region) {
      return std::make_tuple(region.device.type(), region.device.index(), region.begin);
    };
    return key(a->region) < key(b->region);
  });
  std::vector<PlannedStorage> storages;
  for (size_t first = 0; first < byAddress.size();) {
    const c10::Device device = byAddress[first]->region.device;
    const std::byte* end = byAddress[first]->region.end;
    size_t next = first + 1;
    while (next < byAddress.size() && byAddress[next]->region.device == device && byAddress[next]->region.begin < end) {
      end = std::max(end, byAddress[next]->region.end);
      ++next;
    }
    addShared(std::span(byAddress).subspan(first, next - first), storages);
    first = next;
  }
  return storages;
}

// Inline, packed or lent, by size and within the limits.
void choosePlaces(std::vector<PlannedStorage>& storages) {
  using Place = PlannedStorage::Place;
  uint64_t inlineBytes = 0;
  size_t unpackable = 0;
  std::vector<PlannedStorage*> packable;
  for (PlannedStorage& storage : storages) {
    // The body is made now, and on the CPU. A device may still work on its memory.
    const uint64_t mostInline = storage.device.is_cpu() ? kInlineStorageBytes : 0;
    if (storage.bytes <= mostInline) {
      const bool hasRoom = inlineBytes + storage.bytes <= kMaxInlineBytes;
      storage.place = hasRoom ? Place::kInline : Place::kPacked;
      inlineBytes += hasRoom ? storage.bytes : 0;
    } else if (storage.device.is_cpu()) {
      if (storage.bytes < kPackableBytes) {
        packable.push_back(&storage);
      } else {
        ++unpackable;
      }
    }
  }
  const size_t lent = kMaxLentStorages - std::min(kMaxLentStorages, unpackable);
  if (packable.size() > lent) {
    const auto largest = packable.begin() + static_cast<std::ptrdiff_t>(lent);
    std::nth_element(
        packable.begin(), largest, packable.end(), [](const auto* a, const auto* b) { return a->bytes > b->bytes; });
    std::for_each(largest, packable.end(), [](PlannedStorage* storage) { storage->place = Place::kPacked; });
  }
}

} // namespace

std::vector<PlannedStorage> planStorages(std::vector<PlannedTensor>& tensors) {
  std::vector<PlannedStorage> storages = joined(tensors);
  choosePlaces(storages);
  return storages;
}

} // namespace torch_ucx_rpc
