#pragma once

#include "peers/peer.h"

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

// The workers of the job, found by rank, by name or by session. The directory owns its peers and keeps them after they
// are gone. References therefore stay valid, and errors can still name lost workers. Thread-safe.
class Directory {
 public:
  // Adds a worker. It may have the rank and the name of a worker that is gone. It may also be that worker itself, so
  // that a lost worker can be tried again. Throws std::invalid_argument if a worker that is there has the same rank,
  // name or session.
  void add(Member member);

  // Forgets the rank and the name of a worker. Its session stays known, since frames from it may still arrive.
  void remove(const Peer& peer);

  // Null if there is no such worker.
  Peer* find(Rank rank) const;
  Peer* find(const std::string& name) const;
  Peer* findSession(uint64_t session) const;

  // Throw an RpcFailure that names the existing workers, if there is no such worker.
  Peer& at(Rank rank) const;
  Peer& at(const std::string& name) const;
  Peer& at(Rank rank, const std::string& name) const; // throws also if another worker has the rank

  // One more than the highest rank; 0 without workers.
  Rank endOfRanks() const;
  // All workers by rank. Workers that left or failed are among them until remove(), or until another worker takes their
  // rank or name.
  std::vector<Peer*> all() const;
  // Only the workers in state kPresent, by rank.
  std::vector<Peer*> present() const;

 private:
  // The failure that there is no such worker.
  RpcFailure unknown(const std::string& which, RpcFailure::Details details) const;
  void forgetLocked(const Peer* peer);

  mutable std::shared_mutex mutex_;
  // Guarded by mutex_:
  std::map<Rank, Peer*> byRank_;
  std::unordered_map<std::string, Peer*> byName_;
  std::unordered_map<uint64_t, Peer*> bySession_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

} // namespace torch_ucx_rpc
