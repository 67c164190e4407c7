#pragma once

#include "memory/device_streams.h"
#include "transport/transport.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

namespace torch_ucx_rpc {

// Memory for the spans of a message that arrive on devices, or in pinned memory. Allocators may wait for the driver,
// for Python, or for memory that is held back. So callers of run() do not hold the worker lock.
struct DeviceAllocation {
  struct Span {
    size_t index; // of the message's span
    c10::Device device;
    bool isStaging; // host memory, from which the decoder copies
    uint64_t bytes;
    c10::DataPtr data;
    bool isBesidePool = false; // memory of the device, from which the decoder copies
  };

  void run(const Transport& transport) noexcept;

  std::vector<Span> spans;
  bool isFromNeighbour = false; // the sender is a neighbour, whose process must map the memory
  DeviceWork earlierWork;
  std::exception_ptr failure;
  std::atomic<bool> isDone{false}; // run() is over, and the worker lock guards the other members again
};

} // namespace torch_ucx_rpc
