#include "agent/device_streams.h"

#include "memory/host_pool.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using c10::impl::VirtualGuardImpl;

// Bytes as a tensor that does not own them. Not by at::from_blob(), which asks for hooks that not every device type has.
at::Tensor asTensor(void* bytes, uint64_t count, c10::Device device) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      c10::SymInt(static_cast<int64_t>(count)),
      c10::DataPtr(bytes, device),
      nullptr,
      false));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(at::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(count)});
  return tensor;
}

} // namespace

const c10::Device* findDevice(const Devices& devices, int8_t type, int8_t index) {
  const auto found = std::find_if(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return static_cast<int8_t>(device.type()) == type && device.index() == index;
  });
  return found != devices.end() ? &*found : nullptr;
}

Streams currentStreams(const Devices& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const c10::Device device : devices) {
    streams.push_back(VirtualGuardImpl(device.type()).getStream(device));
  }
  return streams;
}

Streams poolStreams(const Devices& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const c10::Device device : devices) {
    streams.push_back(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  return streams;
}

void recordOnCurrentStream(const c10::DataPtr& data) {
  const VirtualGuardImpl device(data.device().type());
  device.recordDataPtrOnStream(data, device.getStream(data.device()));
}

void makeContextCurrent(const Devices& devices) {
  thread_local bool isDone = false;
  if (devices.empty() || std::exchange(isDone, true)) {
    return;
  }
  // A question to the device suffices, and leaves its context current unless the thread has been using another device.
  try {
    const c10::DeviceGuard guard(devices.front());
    const VirtualGuardImpl device(devices.front().type());
    (void)device.queryStream(device.getStream(devices.front()));
  } catch (const std::exception&) {
  }
}

c10::DataPtr copyBytes(const void* bytes, uint64_t count, c10::Device from, c10::Device to) {
  const c10::DeviceGuard guard(to);
  c10::Allocator* allocator = to.is_cpu() ? &HostPool::instance() : c10::GetAllocator(to.type());
  c10::DataPtr copy = allocator->allocate(count);
  if (count != 0) {
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    asTensor(copy.get(), count, to).copy_(asTensor(const_cast<void*>(bytes), count, from));
  }
  return copy;
}

Error deviceFailed(const std::exception& failure) {
  const auto* ofTorch = dynamic_cast<const c10::Error*>(&failure);
  return {
      ErrorCode::kDeviceFailed,
      std::string("a device has failed: ") + (ofTorch != nullptr ? ofTorch->what_without_backtrace() : failure.what())};
}

DeviceWork::DeviceWork(const Streams& streams) {
  for (const c10::Stream& stream : streams) {
    events_.emplace_back(stream.device_type()).record(stream);
  }
}

bool DeviceWork::isDone() {
  std::erase_if(events_, [](const c10::Event& event) { return event.query(); });
  return events_.empty();
}

void DeviceWork::blockStreams(const Streams& streams) const {
  for (const c10::Event& event : events_) {
    for (const c10::Stream& stream : streams) {
      if (stream.device() == event.device()) {
        event.block(stream);
      }
    }
  }
}

c10::Stream ReceiveMemory::streamOf(c10::Device device) {
  const auto entry = streams_.find(device);
  if (entry != streams_.end()) {
    return entry->second;
  }
  return streams_.emplace(device, VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first->second;
}

c10::DataPtr ReceiveMemory::allocate(c10::Device device, uint64_t bytes) {
  const c10::StreamGuard guard(streamOf(device));
  return c10::GetAllocator(device.type())->allocate(bytes);
}

DeviceWork ReceiveMemory::earlierWork(const Devices& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const c10::Device device : devices) {
    streams.push_back(streamOf(device));
  }
  return DeviceWork(streams);
}

} // namespace torch_ucx_rpc
