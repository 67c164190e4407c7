#include "memory/device_streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using c10::impl::VirtualGuardImpl;

// The priorities of streams, from 0 downwards. torch has four at most.
constexpr int kPriorities = 4;

// Calls a virtual function that older versions of torch do not have.
template <typename Guard>
bool isCapturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  }
  return false;
}

// A failing device does not count as idle. Its events show the failure later, where it is handled.
bool isIdle(const c10::Stream& stream) {
  const VirtualGuardImpl guard(stream.device_type());
  try {
    return !isCapturing(guard, stream) && guard.queryStream(stream);
  } catch (const std::exception&) {
    return false;
  }
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

Streams poolStreams(const Devices& devices, int priority) {
  Streams streams;
  streams.reserve(devices.size());
  for (const c10::Device device : devices) {
    streams.push_back(VirtualGuardImpl(device.type()).getNewStream(device, priority));
  }
  return streams;
}

Streams allStreams(c10::Device device) {
  const VirtualGuardImpl guard(device.type());
  Streams streams{guard.getDefaultStream(device)};
  // Each pool gives out its streams in turn, to other threads as well. A stream that another thread got comes again in
  // the next round. For a priority that a device does not have, torch gives the streams of another priority.
  for (int priority = 0; priority > -kPriorities; --priority) {
    for (size_t knownInARow = 0; knownInARow < streams.size();) {
      const c10::Stream next = guard.getNewStream(device, priority);
      if (std::find(streams.begin(), streams.end(), next) != streams.end()) {
        ++knownInARow;
      } else {
        streams.push_back(next);
        knownInARow = 0;
      }
    }
  }
  return streams;
}

Streams uncaptured(const Streams& streams) {
  Streams found;
  std::copy_if(streams.begin(), streams.end(), std::back_inserter(found), [](const c10::Stream& stream) {
    return !isCapturing(VirtualGuardImpl(stream.device_type()), stream);
  });
  return found;
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
  // A query of the device suffices. It leaves the device's context current, unless the thread has been using another
  // device.
  try {
    const c10::DeviceGuard guard(devices.front());
    const VirtualGuardImpl device(devices.front().type());
    (void)device.queryStream(device.getStream(devices.front()));
  } catch (const std::exception&) {
  }
}

Error deviceFailed(const std::exception& failure) {
  const auto* ofTorch = dynamic_cast<const c10::Error*>(&failure);
  const std::string what = ofTorch != nullptr ? ofTorch->what_without_backtrace() : failure.what();
  if (dynamic_cast<const c10::OutOfMemoryError*>(&failure) != nullptr) {
    return {ErrorCode::kOutOfMemory, what};
  }
  return {ErrorCode::kDeviceFailed, "a device has failed: " + what};
}

DeviceWork::DeviceWork(const Streams& streams) {
  for (const c10::Stream& stream : streams) {
    // A fresh CUDA event is not ready for 5 to 10 us, even on an idle stream. So an idle stream gets none.
    if (!isIdle(stream)) {
      events_.emplace_back(stream.device_type()).record(stream);
    }
  }
}

bool DeviceWork::isDone() {
  std::erase_if(events_, [](const c10::Event& event) { return event.query(); });
  return events_.empty();
}

void DeviceWork::wait() {
  for (const c10::Event& event : events_) {
    event.synchronize();
  }
  events_.clear();
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

} // namespace torch_ucx_rpc
