#include "tensors/self_copy.h"

#include "memory/host_pool.h"
#include "tensors/device_copy.h"

#include <cstring>
#include <new>
#include <utility>

namespace torch_ucx_rpc {

namespace {

c10::DataPtr copyOf(const OutgoingMessage::Span& span) {
  if (!span.from.is_cpu() || !span.to.is_cpu()) {
    return copyBytes(span.bytes.data(), span.bytes.size(), span.from, span.to);
  }
  c10::DataPtr copy = HostPool::instance().allocate(span.bytes.size());
  std::memcpy(copy.get(), span.bytes.data(), span.bytes.size());
  return copy;
}

} // namespace

Error copyForSelf(OutgoingMessage& message, IncomingMessage& arrived) {
  arrived.spans.reserve(message.spans.size());
  try {
    Devices devices;
    for (const OutgoingMessage::Span& span : message.spans) {
      arrived.spans.push_back({copyOf(span), span.bytes.size()});
      if (!span.to.is_cpu()) {
        devices.push_back(span.to);
      }
    }
    arrived.pendingWork = DeviceWork(currentStreams(devices)); // the copies wait in these streams
  } catch (const c10::Error& failure) {
    return deviceFailed(failure);
  } catch (const std::bad_alloc&) {
    return outOfMemoryFor(message.totalBytes());
  }
  return {};
}

} // namespace torch_ucx_rpc
