#pragma once

#include "base/error.h"
#include "peers/peer.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// A barrier over the living workers, which also sums a number over them. It runs over the agent's own frames, so it
// needs neither Python nor the Store, whose host may leave first.
//
// The ranks are a tree: the worker of rank r is above those of ranks r * fanOut + 1 to r * fanOut + fanOut. A worker's
// parent is the nearest worker above it that is present; without one, the present worker of lowest rank. The worker
// that has no parent is the coordinator. Arrivals travel up the tree, and each worker passes on those that it has
// collected. The coordinator releases the round when every present worker has arrived, and the release travels down. So
// no worker talks to more than its parent and `fanOut` others, as long as none dies. In a group of up to 1 + fanOut
// workers, all others arrive at the coordinator itself.
//
//   arrive   worker -> parent   "these are in this round, with these values; and these are gone, as far as I know"
//   release  parent -> worker   "this round is over; the sum; the workers that have died"
//   release  worker -> parent   the same, to a parent that takes over
//
// Invariants, whichever workers leave or die, and when. They rely on this: a worker gets everything that another worker
// has sent before it learns of that worker's end.
//
// 1. A round ends when all workers that are still present have arrived. It never waits for a worker that has left or
//    failed, and a death does not make it fail: the result names the dead. The coordinator alone decides, from its own
//    view. A report that a worker is gone only makes the coordinator contact that worker (toContact()).
// 2. All living workers leave a round with the same sum. A new coordinator does not decide a round that its predecessor
//    has released to a living worker: that worker does not arrive again, but sends its new parent the result. An
//    arrival goes to the parent alone, and only the parent's end changes the parent. So only the new coordinator can
//    release a worker whose arrival has reached it.
// 3. Every worker that waits has sent all its collected arrivals to its parent: at once when nothing is missing below
//    it, else at the next tick(). It sends everything again when it gets another parent. A worker that has not entered
//    the round keeps the arrivals that it gets, and answers them when the round ends.
// 4. The parent has a smaller rank than the worker. So arrivals never run in a circle, even if workers see different
//    members, and the present worker of lowest rank becomes the coordinator.
//
// A worker need not learn of the end of workers that it never talks to. It notices the end of its parent, because it
// has sent its arrivals there. It notices the end of the workers directly below it, because it contacts them as long as
// arrivals are missing there (toContact()).
//
// Thread-safe.
class Barrier {
 public:
  static constexpr int kFanOut = 32;

  struct Result {
    int64_t sum = 0; // over the workers that were present at the end of the round
    Error lost; // says which workers have died; no error if none has
  };
  // A worker's knowledge of a round.
  struct Arrivals {
    std::map<Rank, int64_t> values;
    std::set<Rank> gone; // without having arrived, as seen by the sender or workers below it
  };
  // The other workers, as this one sees them, and the way to them. The send functions must not block, and are called
  // without the barrier's lock: the sending thread may hand out events, also for this barrier. The other functions are
  // called with the lock.
  class Link {
   public:
    virtual ~Link() = default;
    virtual bool isPresent(Rank rank) const = 0; // this worker itself included
    virtual Rank endOfRanks() const = 0; // one more than the highest
    virtual Error lost() const = 0; // names the workers that have failed
    virtual void sendArrive(Rank to, uint64_t round, const Arrivals& arrivals) = 0;
    virtual void sendRelease(Rank to, uint64_t round, const Result& result) = 0;
  };

  Barrier(Rank self, Link& link, int fanOut = kFanOut) : self_(self), link_(link), fanOut_(fanOut) {}

  // Enters the next round and returns its number. Every worker must enter the same rounds. One thread at a time.
  uint64_t enter(int64_t value);

  // Waits until the round entered last has been released and this worker has passed the release on. False after
  // `limit`; may be called again.
  bool wait(std::chrono::milliseconds limit, Result& result);

  // To be called now and then while this worker waits.
  void tick();

  // The present workers whose arrival is missing. The coordinator looks at all workers, the others at those below them.
  std::vector<Rank> missing() const;
  // The workers whose end this one must notice: each worker directly below it whose arrival is missing, or below which
  // an arrival is missing. The coordinator must also notice the end of workers that others report as gone.
  std::vector<Rank> toContact() const;

  // To be called for arriving frames and changes of membership, from any thread.
  void onArrive(Rank from, uint64_t round, const Arrivals& arrivals);
  void onRelease(Rank from, uint64_t round, const Result& result);
  void onMembershipChange();

 private:
  // A round that has not been released on this worker.
  struct Round {
    Arrivals arrivals;
    std::set<Rank> senders; // workers that get the result
    std::optional<Rank> absent; // a worker that was missing at the last look; saves a search for each frame
    bool isTold = false; // the parent knows all of `arrivals`
  };
  // The frames to send once the lock is released.
  struct Outgoing {
    struct Arrive {
      Rank to;
      uint64_t round;
      Arrivals arrivals;
    };
    struct Release {
      Rank to;
      uint64_t round;
      Result result;
    };
    std::vector<Arrive> arrives;
    std::vector<Release> releases;
    int roundsOver = 0;
  };

  std::optional<Rank> parentLocked() const; // none for the coordinator
  // Returns the first rank for which `look` is true: `top`, or a rank below it in the tree.
  template <typename Look>
  std::optional<Rank> findBelow(Rank top, const Look& look) const;
  bool isAwaitedLocked(Rank rank, const Round& round, bool isCoordinator) const;
  void followParentLocked(Outgoing& outgoing);
  void proceedLocked(uint64_t number, Outgoing& outgoing, bool isTick = false);
  void releaseLocked(uint64_t number, const Result& result, std::optional<Rank> from, Outgoing& outgoing);
  void send(const Outgoing& outgoing);

  const Rank self_;
  Link& link_;
  const int fanOut_;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  // Guarded by mutex_:
  uint64_t entered_ = 0; // rounds are numbered from 1
  std::map<uint64_t, Round> rounds_; // rounds not yet released here, of which arrivals are known
  std::map<uint64_t, Result> results_; // the last few rounds released here
  std::optional<Rank> parent_; // the parent at the last look
  int passingOn_ = 0; // releases that threads are passing on
};

} // namespace torch_ucx_rpc
