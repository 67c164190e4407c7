#pragma once

#include "memory/devices_in_use.h"
#include "messaging/messenger_parts.h"

namespace torch_ucx_rpc {

// Asks devices whether the work that messages wait for is done, and whether released device memory is still in use. No
// event announces either. Idle where RPC uses no devices. Thread-safe, except functions that need the worker lock.
class DeviceWatch : private MessengerParts {
 public:
  DeviceWatch(const MessengerParts& parts, const DevicesInUse& devices);

  // Whether RPC uses devices.
  bool isOn() const {
    return !devices_.get().empty();
  }

  // Call it first in each round. Any thread may drive, and UCX needs a device context on that thread.
  void beginRoundWithWorkerLock();
  // Makes another round begin soon, since a message waits for a device.
  void askAgain();

 private:
  // Timer tasks.
  Timer::TimePoint ask();
  Timer::TimePoint collect(Timer::TimePoint now);

  const DevicesInUse& devices_;
  Timer::Task& askTask_;
  Timer::Task& collectionTask_;
};

} // namespace torch_ucx_rpc
