#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace torch_ucx_rpc {

// The part that a thread plays while it drives progress. A leader is an agent thread that waits for any event. A
// waiting caller is a user's thread that waits for the answer to its call.
enum class Role : uint8_t { kLeader, kWaitingCaller };

// Describes the thread that hands out a batch, if that thread drives progress. A thread that only submitted an
// operation is not a driver. It may hold torch's locks, so nothing that belongs to other calls may run on it.
struct Driver {
  Role role = Role::kLeader;
  std::optional<uint64_t> awaitedCall; // the call whose answer a waiting caller waits for
};

// Events that progress brought about. They are collected under the worker lock and handed out once, after its release.
class EventBatch {
 public:
  virtual ~EventBatch() = default;
  virtual void dispatch(const std::optional<Driver>& driver) = 0;
};

// The owner of a transport, as Progress sees it. Progress calls it under the worker lock only.
class ProgressClient {
 public:
  virtual ~ProgressClient() = default;

  // Starts operations that a transport forbids inside its callbacks. Runs after each batch of operations, and after
  // each Transport::progress().
  virtual void startDeferredWithWorkerLock() = 0;

  // Whether messages may be in device memory, which devices copy without any thread.
  virtual bool usesDevices() const {
    return false;
  }
  // Whether a message waits for work of a device. No event announces its end: startDeferredWithWorkerLock() asks the
  // device.
  virtual bool waitsForDeviceWithWorkerLock() const {
    return false;
  }

  virtual bool hasEventsWithWorkerLock() const = 0;
  // Whether the thread that hands these events out may block.
  virtual bool mayEventsBlockWithWorkerLock() const {
    return false;
  }
  // Moves all events so far into a batch for the calling thread. Null if there are none.
  virtual std::unique_ptr<EventBatch> takeEventsWithWorkerLock() = 0;
};

} // namespace torch_ucx_rpc
