#include "messaging/shared_memory_repair.h"

#include "base/warnings.h"
#include "runtime/worker_mutex.h"

#include <chrono>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// How often the worker tries a repair. Until a repair succeeds, no other worker can send to this one over shared
// memory.
constexpr auto kPeriod = std::chrono::milliseconds(20);

} // namespace

SharedMemoryRepair::SharedMemoryRepair(const MessengerParts& parts)
    : MessengerParts(parts), task_(timer_.add([this](Timer::TimePoint now) { return repair(now); })) {}

void SharedMemoryRepair::request() {
  isWanted_.store(true);
  task_.dueNow();
}

Timer::TimePoint SharedMemoryRepair::repair(Timer::TimePoint now) {
  if (now < repairedAt_ + kPeriod) {
    return repairedAt_ + kPeriod; // calls that time out ask for a check one by one
  }
  repairedAt_ = now;
  if (isRepairing_.load()) {
    transport_.scanForRepair(); // on this thread, since it may take long: the worker lock is free during it
  }
  progress_.submit([this] {
    if (!lifetime_.isClosed()) {
      repairWithWorkerLock();
    }
  });
  // The operation may still be queued. The task then runs once more than needed.
  return isWanted_.load() || isRepairing_.load() ? now + kPeriod : Timer::kNever;
}

void SharedMemoryRepair::repairWithWorkerLock() {
  assertHoldsWorkerLock();
  isWanted_.store(false);
  const RepairState state = transport_.repairState();
  isRepairing_.store(state != RepairState::kWhole);
  if (state == RepairState::kWhole) {
    isDeaf_ = false;
  } else if (state == RepairState::kUnrepairable && !std::exchange(isDeaf_, true)) {
    if (!std::exchange(hasWarned_, true)) {
      warn(
          "messages of workers on this machine do not arrive: a process has ended or been stopped while it wrote one "
          "into shared memory, and may never go on. From now on these workers and this one use "
          "the network, unless UCX_TLS leaves it out; messages that were under way arrive when that process goes on");
    }
    for (Peer* peer : directory_.present()) {
      if (peer->isNeighbour.load()) {
        Connection& connection = connections_.of(*peer);
        connection.isMoving = true;
        connections_.makeReady(connection);
      }
    }
  }
}

bool SharedMemoryRepair::moveWithWorkerLock(Connection& connection) {
  assertHoldsWorkerLock();
  connection.isMoving = false;
  const Peer& peer = connection.peer();
  // A peer of another machine has no shared memory to leave. If this worker has moved, both have: two deaf workers
  // would tell each other without end.
  if (!peer.isNeighbour.load() || peer.isOverNetwork.load()) {
    return true;
  }
  const Error error = outbox_.moveToNetwork(connection);
  if (!error && isDeaf_) {
    outbox_.sendControl(connection.peer(), wire::Kind::kUseNetwork);
  }
  connection.isMoving = isLocal(error.code());
  return !connection.isMoving;
}

} // namespace torch_ucx_rpc
