#pragma once

#include "base/error.h"
#include "peers/directory.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// A barrier over the living workers, which also sums a number over them. Each worker announces its arrival to the
// coordinator, the present worker of lowest rank. The coordinator releases the round when every present worker has
// arrived. The barrier runs over the agent's own frames, so it needs neither Python nor the Store, whose host may leave
// first.
//
//   arrive   worker -> coordinator   "I am in this round, with this value"
//   release  coordinator -> worker   "this round is over; the sum; the workers that have died"
//   release  worker -> coordinator   the same, to a coordinator that takes over
//
// Invariants, for any worker that leaves or dies at any moment:
//
// 1. A round ends when all workers that are still present have arrived. It never waits for a worker that has left or
//    failed, and a death ends no round: the result names the dead.
// 2. All living workers leave a round with the same sum. A new coordinator decides no round that its predecessor has
//    released to a worker that lives: that worker does not arrive again, but tells it the result.
// 3. Every worker that waits has told its arrival to the worker that it takes for the coordinator, and tells it again
//    whenever the membership changes. A worker that is not the coordinator, or not yet, keeps the arrival and answers
//    it when the round ends.
//
// Thread-safe.
class Barrier {
 public:
  struct Result {
    int64_t sum = 0; // over the workers that were present at the end of the round
    Error lost; // says which workers have died; no error if none has
  };
  // Sends the barrier's frames, without blocking. Called without the barrier's lock: the sending thread may hand out
  // events on the way, and they may be for this barrier.
  class Link {
   public:
    virtual ~Link() = default;
    virtual void sendArrive(Peer& coordinator, uint64_t round, int64_t value) = 0;
    virtual void sendRelease(Peer& to, uint64_t round, const Result& result) = 0;
  };

  Barrier(const Directory& directory, Rank self, Link& link) : directory_(directory), self_(self), link_(link) {}

  // Enters the next round and returns its number. Every worker must enter the same rounds. One thread at a time.
  uint64_t enter(int64_t value);

  // Waits for the release of the round entered last. False after `limit`; may be called again.
  bool wait(std::chrono::milliseconds limit, Result& result);

  // The workers whose arrival is missing. Only the coordinator knows them; empty on other workers.
  std::vector<Peer*> missing() const;

  // To be called for arriving frames and changes of membership, from any thread.
  void onArrive(Peer& from, uint64_t round, int64_t value);
  void onRelease(uint64_t round, Result result);
  void onMembershipChange();

 private:
  using Arrivals = std::map<Rank, int64_t>; // the values
  // The frames to send once the lock is released.
  struct Outgoing {
    Peer* arriveAt = nullptr;
    uint64_t round = 0;
    int64_t value = 0;
    struct Release {
      Peer* to;
      uint64_t round;
      Result result;
    };
    std::vector<Release> releases;
  };

  Peer* coordinatorLocked() const;
  bool isCoordinatorLocked() const;
  Error lostLocked() const;
  void arriveLocked(Outgoing& outgoing);
  void recordLocked(Rank rank, uint64_t round, int64_t value, Outgoing& outgoing);
  void tellCoordinatorLocked(Outgoing& outgoing);
  void releaseIfCompleteLocked(uint64_t round, Outgoing& outgoing);
  void releaseLocked(uint64_t round, const Result& result, Outgoing& outgoing);
  void send(const Outgoing& outgoing);

  const Directory& directory_;
  const Rank self_;
  Link& link_;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  // Guarded by mutex_:
  uint64_t entered_ = 0; // rounds are numbered from 1
  int64_t value_ = 0;
  std::map<uint64_t, Arrivals> rounds_; // rounds not yet released here, of which arrivals are known
  std::map<uint64_t, Result> results_; // the last few rounds released here
  const Peer* coordinator_ = nullptr; // when this worker entered a round, or told its coordinator, the last time
};

} // namespace torch_ucx_rpc
