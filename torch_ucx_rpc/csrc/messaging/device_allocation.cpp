#include "messaging/device_allocation.h"

#include "memory/device_pool.h"

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Allocates device memory for bytes that a process of this machine sends. That process must map the memory. RMM's
// resources may give memory that no other process can map, such as cudaMallocAsync's. UCX would copy the bytes through
// host memory in small pieces, under the worker lock. So this function takes torch's memory instead, if another process
// can map it.
void allocateForNeighbour(DeviceAllocation::Span& span, const Transport& transport) {
  DevicePool& pool = DevicePool::instance();
  if (!pool.isUnshareable()) {
    span.data = pool.allocate(span.device, span.bytes);
    if (span.bytes == 0 || transport.canShare(span.data.get(), span.bytes)) {
      return;
    }
  }
  c10::DataPtr beside = pool.allocateBeside(span.device, span.bytes);
  if (beside.get() != nullptr && transport.canShare(beside.get(), span.bytes)) {
    pool.noteUnshareable(); // the next message skips the attempt
    span.data = std::move(beside);
    span.isBesidePool = true;
  } else if (span.data.get() == nullptr) {
    span.data = pool.allocate(span.device, span.bytes);
  }
}

} // namespace

void DeviceAllocation::run(const Transport& transport) noexcept {
  DevicePool& pool = DevicePool::instance();
  try {
    Devices written; // the devices whose memory the transport writes to, outside of any stream
    for (Span& span : spans) {
      if (span.isStaging) {
        span.data = pool.allocateStaging(span.device, span.bytes);
        continue;
      }
      if (isFromNeighbour) {
        allocateForNeighbour(span, transport);
      } else {
        span.data = pool.allocate(span.device, span.bytes);
      }
      if (std::find(written.begin(), written.end(), span.device) == written.end()) {
        written.push_back(span.device);
      }
    }
    earlierWork = pool.earlierWork(written);
  } catch (...) {
    failure = std::current_exception();
  }
  isDone.store(true); // last: from now on the thread with the worker lock reads the other members
}

} // namespace torch_ucx_rpc
