#pragma once

#include "base/error.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <vector>

namespace torch_ucx_rpc {

// Streams of devices other than the CPU, which all are of one type. By torch's device-generic interface alone: nothing
// here knows CUDA. docs/gpu.md has the rules that these are the words of.
using Devices = std::vector<c10::Device>;
using Streams = std::vector<c10::Stream>;

// The one with torch's numbers for a type and an index; null if it is not among them.
const c10::Device* findDevice(const Devices& devices, int8_t type, int8_t index);

// The streams that are current on this thread, one for each device.
Streams currentStreams(const Devices& devices);

// Streams of torch's pool, one for each device, on which no other work of ours is ordered.
Streams poolStreams(const Devices& devices);

// All that torch has of a device: its default stream, and those of its pools.
Streams allStreams(c10::Device device);

// These without those that are being captured into a graph, which do nothing meanwhile, and must not be asked.
Streams uncaptured(const Streams& streams);

// Tells torch's allocator that memory is used on the stream that is current on its device: released, it is not reused
// before what is in that stream by then is done.
void recordOnCurrentStream(const c10::DataPtr& data);

// UCX's CUDA transports expect of the thread that drives them that a context is current. Does something once for each
// thread. A device that fails says so where it is used, not here.
void makeContextCurrent(const Devices& devices);

// What torch has thrown for a device, without its backtrace. It may be the failure of something that has run there long
// before.
Error deviceFailed(const std::exception& failure);

// What was in some streams when this was made: nothing where they had nothing to do. Not thread-safe.
class DeviceWork {
 public:
  DeviceWork() = default; // nothing
  explicit DeviceWork(const Streams& streams);

  // Does not block. Throws what the device fails with.
  bool isDone();

  // Blocks until it is done.
  void wait();

  // Has streams wait for that part of the work which is on their own device.
  void blockStreams(const Streams& streams) const;

 private:
  std::vector<c10::Event> events_;
};

} // namespace torch_ucx_rpc
