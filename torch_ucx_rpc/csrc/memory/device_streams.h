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

// Devices other than the CPU, all of one type, and their streams. This file uses only torch's device-generic interface:
// nothing here knows CUDA. docs/gpu.md has the rules that it implements.
using Devices = std::vector<c10::Device>;
using Streams = std::vector<c10::Stream>;

// Finds the device by torch's numbers for its type and its index. Null if it is not among them.
const c10::Device* findDevice(const Devices& devices, int8_t type, int8_t index);

// The streams that are current on this thread, one for each device.
Streams currentStreams(const Devices& devices);

// The next streams of torch's pools, one for each device. A pool gives its streams out in turn, so a stream may have
// other users too. A lower number is more urgent, and 0 is the least urgent. A priority that a device does not have
// counts as its nearest one.
Streams poolStreams(const Devices& devices, int priority);

// All streams that torch has for a device: its default stream, and those of its pools.
Streams allStreams(c10::Device device);

// Returns the streams that are not being captured into a graph. A stream does no work while it is captured, and must
// not be asked.
Streams uncaptured(const Streams& streams);

// Tells torch's allocator that memory is used on the current stream of its device. After the memory's release, the
// allocator reuses it only once the stream has done the work that it had at the release.
void recordOnCurrentStream(const c10::DataPtr& data);

// Makes a context current on the calling thread, once for each thread. UCX's CUDA transports need one on the thread
// that drives them. It ignores a failing device: the code that uses the device reports the failure.
void makeContextCurrent(const Devices& devices);

// The error for torch's exception about a device, without its backtrace. The cause may be work that ran on the device
// long before. A lack of device memory is not a failed device: it becomes ErrorCode::kOutOfMemory.
Error deviceFailed(const std::exception& failure);

// The work that some streams had when the object was made; nothing if they were idle. Not thread-safe.
class DeviceWork {
 public:
  DeviceWork() = default; // nothing
  explicit DeviceWork(const Streams& streams);

  // Whether the work is done. Does not block. Throws if the device has failed.
  bool isDone();

  // Blocks until the work is done.
  void wait();

  // Makes each stream wait for the part of the work that is on its own device.
  void blockStreams(const Streams& streams) const;

 private:
  std::vector<c10::Event> events_;
};

} // namespace torch_ucx_rpc
