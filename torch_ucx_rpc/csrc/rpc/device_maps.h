#pragma once

#include "memory/devices_in_use.h"
#include "tensors/tensor_codec.h"

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_ucx_rpc {

// Says on which devices the tensors of this worker's messages arrive, by the name of the receiver. The maps for answers
// are those that the callers wish. Thread-safe.
class DeviceMaps {
 public:
  using ByWorker = std::unordered_map<std::string, DeviceMap>;

  // `devices` are the devices of this worker that RPC uses besides the CPU, all of one type.
  void set(ByWorker requests, ByWorker answers, Devices devices) {
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

 private:
  DeviceMap find(const ByWorker& maps, const std::string& worker) const {
    if (!hasAny_.load()) {
      return {}; // no lock, since every call asks
    }
    const std::lock_guard lock(mutex_);
    const auto entry = maps.find(worker);
    return entry != maps.end() ? entry->second : DeviceMap{};
  }

  DevicesInUse devices_; // own synchronization
  std::atomic<bool> hasAny_{false};

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  ByWorker requests_;
  ByWorker answers_;
};

} // namespace torch_ucx_rpc
