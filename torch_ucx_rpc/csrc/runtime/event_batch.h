#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace torch_ucx_rpc {

// What a thread drives progress as: an agent thread that waits for whatever comes, or a caller that waits for its answer.
enum class Role : uint8_t { kLeader, kWaitingCaller };

// The thread that hands out a batch, if it drives progress. A thread that only submitted an operation is no driver: it may hold
// locks of torch's, so nothing that belongs to other calls may run on it.
struct Driver {
  Role role = Role::kLeader;
  std::optional<uint64_t> awaitedCall; // the call whose answer a waiting caller waits for
};

// Events that progress brought about. They are collected under the worker lock and handed out, once, after its release.
class EventBatch {
 public:
  virtual ~EventBatch() = default;
  virtual void dispatch(const std::optional<Driver>& driver) = 0;
};

// The owner of a transport, as Progress sees it. Progress calls it under the worker lock only.
class ProgressClient {
 public:
  virtual ~ProgressClient() = default;

  // Starts operations that a transport forbids inside its callbacks. Runs after each batch of operations and each progress().
  virtual void startDeferredWithWorkerLock() = 0;

  virtual bool hasEventsWithWorkerLock() const = 0;
  // The calling thread takes all events so far; null where there are none.
  virtual std::unique_ptr<EventBatch> takeEventsWithWorkerLock() = 0;
};

} // namespace torch_ucx_rpc
