#pragma once

#include "peers/peer.h"

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

// The workers of the job: by rank, by name, by session. Peers live as long as the directory, also after they are gone,
// so references stay valid and errors can still name them. Thread-safe.
class Directory {
 public:
  // The rank and the name of a worker that is gone can be taken again, by itself too: who was lost may be tried anew. Throws
  // std::invalid_argument where a worker that is there has the same rank, name or session.
  void add(Member member);

  // Forgets the rank and the name of a worker. Its session stays known: frames of it may still arrive.
  void remove(const Peer& peer);

  // Null where there is no such worker.
  Peer* find(Rank rank) const;
  Peer* find(const std::string& name) const;
  Peer* findSession(uint64_t session) const;

  // Throw RpcFailure naming the workers that do exist.
  Peer& at(Rank rank) const;
  Peer& at(const std::string& name) const;

  // By rank, those that left or failed included.
  std::vector<Peer*> all() const;
  // By rank, only those still there.
  std::vector<Peer*> present() const;

 private:
  std::string knownNamesLocked() const;
  void forgetLocked(const Peer* peer);

  mutable std::shared_mutex mutex_;
  // Guarded by mutex_:
  std::map<Rank, Peer*> byRank_;
  std::unordered_map<std::string, Peer*> byName_;
  std::unordered_map<uint64_t, Peer*> bySession_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

} // namespace torch_ucx_rpc
