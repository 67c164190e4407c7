#pragma once

#include "peers/peer.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace torch_ucx_rpc {

using torch::distributed::rpc::Message;

// The RRefs that other workers are to make for this one, from rpc.remote() to the answer of their owner.
//
// The owner makes the value even if rpc.remote() has timed out meanwhile. But torch gives its reference up then, and an
// owner forgets the deletion of a reference to what it has not made yet: it would keep the value for ever. So these
// deletions stay here until the owner has answered. Thread-safe.
class UnmadeRRefs {
 public:
  using ForkId = torch::distributed::rpc::ForkId;

  // To be called before the request is sent.
  void add(uint64_t callId, const Peer& owner);

  // rpc.remote() has timed out. From now on torch may delete this reference.
  void giveUp(uint64_t callId, const ForkId& reference);

  // Keeps a request that deletes a reference (RREF_USER_DELETE). False if it can be sent now.
  bool keep(const c10::intrusive_ptr<Message>& deletion);

  bool keepsAny() const;

  // The owner has answered, or never will. Returns the deletion that is to be sent now; null if there is none.
  c10::intrusive_ptr<Message> take(uint64_t callId, const Peer& owner);

  // The owner is gone.
  void forget(const Peer& owner);

  bool isAwaited(uint64_t callId, const Peer& owner) const;

 private:
  struct Entry {
    const Peer* owner;
    std::optional<ForkId> reference; // once given up
    c10::intrusive_ptr<Message> deletion; // null: torch has not deleted the reference
  };
  using Entries = std::unordered_map<uint64_t, Entry>;

  Entries::iterator eraseLocked(Entries::iterator entry);

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  Entries entries_; // by the call that makes the RRef
  std::unordered_map<ForkId, uint64_t, ForkId::Hash> givenUp_; // calls by the references that they make
};

} // namespace torch_ucx_rpc
