#pragma once

#include "base/error.h"
#include "base/warnings.h"
#include "memory/devices_in_use.h"
#include "tensors/tensor_codec.h"

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_ucx_rpc {

// Says on which devices the tensors of this worker's messages arrive, by the name of the receiver. Also chooses the
// streams for messages that arrive here. Each caller chooses the map for the answers that it gets. Thread-safe.
class DeviceMaps {
 public:
  using ByWorker = std::unordered_map<std::string, DeviceMap>;

  // `deviceMemoryRefusal` says why the transport takes no device memory, if it takes none.
  explicit DeviceMaps(int streamPriority = 0, Error deviceMemoryRefusal = {})
      : streamPriority_(streamPriority), deviceMemoryRefusal_(std::move(deviceMemoryRefusal)) {}

  // `devices` are the devices of this worker that RPC uses besides the CPU, all of one type. Warns when the first
  // devices are set, if their memory will be copied through host memory.
  void set(ByWorker requests, ByWorker answers, Devices devices) {
    if (deviceMemoryRefusal_ && !devices.empty() && devices_.get().empty()) {
      warn(
          "tensors on devices are copied through the host's memory, which is slower. " +
          deviceMemoryRefusal_.message());
    }
    const std::lock_guard lock(mutex_);
    requests_ = std::move(requests);
    answers_ = std::move(answers);
    hasAny_.store(!requests_.empty() || !answers_.empty());
    devices_.set(std::move(devices));
  }

  DeviceMap forRequestsTo(const std::string& worker) const {
    return find(requests_, worker);
  }
  DeviceMap forAnswersTo(const std::string& worker) const {
    return find(answers_, worker);
  }
  bool hasAny() const {
    return hasAny_.load();
  }
  const DevicesInUse& devicesInUse() const {
    return devices_;
  }
  const Devices& devices() const {
    return devices_.get();
  }
  // Streams for a message that has arrived, one for each of these devices.
  Streams takeStreams(const Devices& devices) const {
    return poolStreams(devices, streamPriority_);
  }

 private:
  DeviceMap find(const ByWorker& maps, const std::string& worker) const {
    if (!hasAny_.load()) {
      return {}; // no lock, since every call asks
    }
    const std::lock_guard lock(mutex_);
    const auto entry = maps.find(worker);
    return entry != maps.end() ? entry->second : DeviceMap{};
  }

  const int streamPriority_;
  const Error deviceMemoryRefusal_;
  DevicesInUse devices_; // own synchronization
  std::atomic<bool> hasAny_{false};

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  ByWorker requests_;
  ByWorker answers_;
};

} // namespace torch_ucx_rpc
