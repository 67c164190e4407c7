#include "messaging/retries.h"

#include "base/warnings.h"
#include "runtime/worker_mutex.h"

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

constexpr auto kPeriod = std::chrono::milliseconds(20);

// How many rounds this worker waits for a peer to announce or send something again, before it asks for that.
constexpr unsigned kRoundsToAsk = 25;

// How many rounds lie between two attempts to close an end that the peer has given up.
constexpr unsigned kRoundsToClose = 5;

// How often the log says that messages cannot be sent.
constexpr auto kReminder = std::chrono::seconds(10);

} // namespace

Retries::Retries(const MessengerParts& parts, SharedMemoryRepair& repair)
    : MessengerParts(parts), repair_(repair), task_(timer_.add([this](Timer::TimePoint now) { return retry(now); })) {}

void Retries::schedule() {
  assertHoldsWorkerLock();
  task_.dueIn(kPeriod);
}

Timer::TimePoint Retries::retry(Timer::TimePoint now) {
  const bool isTold = now < warnedAt_ + kReminder;
  warnedAt_ = isTold ? warnedAt_ : now;
  progress_.submit([this, isTold] {
    if (lifetime_.isClosed()) {
      return;
    }
    if (!isTold && outbox_.hasStranded()) {
      warn(outbox_.describeStranded());
    }
    files_.release(); // for the connections that are tried again now
    for (const std::unique_ptr<Connection>& connection : connections_.all()) {
      if (connection->isMoving && !repair_.moveWithWorkerLock(*connection)) {
        schedule();
      }
      if (resume(*connection)) {
        schedule();
      }
    }
    outbox_.retryStranded();
    files_.refill();
  });
  return Timer::kNever; // the operation schedules the task again if there is more to do
}

bool Retries::resume(Connection& connection) {
  if (connection.state() == Connection::State::kClosed) {
    return false;
  }
  if (connection.state() == Connection::State::kResuming &&
      (connection.roundsToResume == 0 || --connection.roundsToResume == 0)) {
    outbox_.resume(connection);
  }
  const uint64_t lacking = connection.lacking();
  if (std::exchange(connection.incoming.lacked, lacking) != lacking && connection.incoming.stalled.empty()) {
    connection.roundsStalled = 0; // another frame is missing now: frames overtake each other
  }
  const bool isStalled = !connection.incoming.stalled.empty() || lacking != 0;
  if (isStalled && ++connection.roundsStalled % kRoundsToAsk == 0) {
    outbox_.acknowledge(connection, true);
  }
  connection.roundsStalled = isStalled ? connection.roundsStalled : 0;
  const std::vector<const void*> outdated = connection.incoming.outdatedOrigins();
  connection.roundsOutdated = outdated.empty() ? 0 : connection.roundsOutdated + 1;
  if (connection.roundsOutdated >= kRoundsToAsk && connection.roundsOutdated % kRoundsToClose == 0) {
    for (const void* origin : outdated) {
      if (!transport_.closeOrigin(origin)) {
        connection.outgoing.whyBroken = "the peer has replaced its end of it";
        connections_.makeReady(connection);
      }
    }
  }
  return isStalled || connection.incoming.mayBeOutdated || connection.state() == Connection::State::kResuming;
}

} // namespace torch_ucx_rpc
