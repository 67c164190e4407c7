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

// A barrier over the workers that are present, which also sums a number. Each worker reports to the coordinator, the
// present worker of lowest rank. When all have reported, the coordinator releases them. The barrier runs over the
// agent's own frames, so it needs neither Python nor the Store, whose host may leave first. When a worker dies, the
// barrier ends with an error instead of never.
//
// The barrier does not wait for workers that said goodbye. When the coordinator itself goes, the next one takes over,
// and every worker reports again. The new coordinator also answers for rounds that the old one may have released only
// in part. Thread-safe.
class Barrier {
 public:
  struct Result {
    int64_t sum = 0;
    Error error;
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
  struct Round {
    std::map<Rank, int64_t> arrived;
  };
  // The frames to send once the lock is released.
  struct Outgoing {
    Peer* arriveAt = nullptr;
    uint64_t round = 0;
    int64_t value = 0;
    std::vector<std::pair<Peer*, std::pair<uint64_t, Result>>> releases;
  };

  Peer* coordinatorLocked() const;
  void noteFailedLocked();
  void arriveLocked(Rank rank, uint64_t round, int64_t value, Outgoing& outgoing);
  void releaseIfCompleteLocked(uint64_t round, Outgoing& outgoing);
  void send(const Outgoing& outgoing);

  const Directory& directory_;
  const Rank self_;
  Link& link_;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  // Guarded by mutex_:
  uint64_t entered_ = 0; // rounds are numbered from 1
  int64_t value_ = 0;
  std::map<uint64_t, Round> rounds_; // rounds not yet released here, as coordinator
  std::map<uint64_t, Result> results_; // the last few rounds released here
  // In the order of their failures: other workers may have ended a round over the first.
  std::vector<const Peer*> failed_;
};

} // namespace torch_ucx_rpc
