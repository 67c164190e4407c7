#include "tensors/lent_memory.h"

#include "memory/host_pool.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COW.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using Context = std::unique_ptr<void, c10::DeleterFnPtr>;

// The context of memory that a storage shares with loans. The last owner frees the memory.
struct SharedMemory {
  explicit SharedMemory(Context memory) : memory(std::move(memory)) {}

  std::atomic<size_t> owners{1};
  const Context memory;
};

void release(void* context) {
  auto* const shared = static_cast<SharedMemory*>(context);
  if (shared->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    delete shared;
  }
}

// Guards the contexts and deleters of all storages. Their addresses need no guard: they stay the same.
std::mutex& contexts() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

// Whether no other code looks at the deleter. torch recognizes shared, pinned and device memory by it.
bool isShareable(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  if (!storage.resizable() || !data.device().is_cpu() || data.get_context() == nullptr) {
    return false;
  }
  const c10::Allocator* const allocator = storage.allocator();
  return allocator == &HostPool::instance() ||
      (allocator == c10::GetCPUAllocator() && data.get_context() == data.get() &&
       data.get_deleter() == allocator->raw_deleter());
}

c10::DataPtr share(c10::StorageImpl& storage) {
  const std::lock_guard lock(contexts());
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release) {
    if (!isShareable(storage)) {
      return {};
    }
    Context&& context = data.move_context(); // a reference into `data`, which still has it if the next line throws
    auto shared = std::make_unique<SharedMemory>(std::move(context));
    context = Context(shared.release(), &release);
  }
  auto* const shared = static_cast<SharedMemory*>(data.get_context());
  shared->owners.fetch_add(1, std::memory_order_relaxed);
  return {data.get(), shared, &release, data.device()};
}

} // namespace

bool isMemoryOwned(const c10::Storage& storage) {
  const std::lock_guard lock(contexts());
  return storage.data_ptr().get_context() != nullptr && !c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
}

LentMemory LentMemory::lend(c10::Storage storage) {
  c10::DataPtr memory = share(*storage.unsafeGetStorageImpl());
  return {std::move(storage), std::move(memory)};
}

LentMemory::LentMemory(c10::Storage storage, c10::DataPtr memory)
    : storage_(std::move(storage)), memory_(std::move(memory)) {}

} // namespace torch_ucx_rpc
