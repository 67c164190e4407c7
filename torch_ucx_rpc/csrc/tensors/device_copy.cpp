#include "tensors/device_copy.h"

#include "memory/device_pool.h"
#include "memory/host_pool.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

namespace torch_ucx_rpc {

namespace {

// Bytes as a tensor that owns them. at::from_blob() would ask for hooks that not every device type has.
at::Tensor asTensor(c10::DataPtr data, uint64_t count) {
  const c10::Device device = data.device();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(count)), std::move(data), nullptr, false));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(at::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(count)});
  return tensor;
}

// Bytes as a tensor that does not own them.
at::Tensor viewOf(const void* bytes, uint64_t count, c10::Device device) {
  return asTensor(c10::DataPtr(const_cast<void*>(bytes), device), count);
}

} // namespace

c10::Allocator* allocatorOf(const c10::DeviceType& type) {
  // Calls the device's kernel directly, because this may be a user's thread in one of torch's modes.
  const c10::Device device(type);
  const at::Tensor empty = at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, at::kStrided, device)),
      c10::SymIntArrayRef(c10::SymInt(0)),
      at::kByte,
      at::kStrided,
      device,
      /*pin_memory=*/false,
      /*memory_format=*/std::nullopt);
  return empty.storage().allocator();
}

c10::DataPtr copyBytes(const void* bytes, uint64_t count, c10::Device from, c10::Device to) {
  const c10::DeviceGuard guard(to);
  c10::DataPtr copy =
      to.is_cpu() ? HostPool::instance().allocate(count) : DevicePool::instance().allocateInOrder(to, count);
  if (count != 0) {
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    viewOf(copy.get(), count, to).copy_(viewOf(bytes, count, from));
  }
  return copy;
}

c10::DataPtr moveToDevice(c10::DataPtr bytes, uint64_t count, c10::Device to) {
  const c10::DeviceGuard guard(to);
  c10::DataPtr copy = DevicePool::instance().allocateInOrder(to, count);
  if (count != 0) {
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    if (!bytes.device().is_cpu()) {
      recordOnCurrentStream(bytes);
    }
    // The source is a tensor that owns its memory: torch then tells its pool of pinned memory about the copy.
    viewOf(copy.get(), count, to).copy_(asTensor(std::move(bytes), count), /*non_blocking=*/true);
  }
  return copy;
}

c10::DataPtr allocatePinned(c10::Device device, uint64_t bytes) {
  const c10::DeviceGuard guard(device);
  return at::getHostAllocator(device.type())->allocate(bytes);
}

at::Tensor stageBytes(const void* bytes, uint64_t count, c10::Device from) {
  const c10::DeviceGuard guard(from);
  at::Tensor staged = asTensor(allocatePinned(from, count), count);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  staged.copy_(viewOf(bytes, count, from), /*non_blocking=*/true);
  return staged;
}

} // namespace torch_ucx_rpc
