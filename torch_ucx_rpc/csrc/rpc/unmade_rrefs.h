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
// The owner makes the value even if rpc.remote() has timed out. But torch then gives up its reference, and the owner
// ignores the deletion of a reference that it does not know yet. It would keep the value for ever. So the deletion is
// sent again when the owner has answered. (If the function returns a future, the first deletion counts: the owner knows
// the reference by then, and answers later or never.) Thread-safe.
class UnmadeRRefs {
 public:
  using ForkId = torch::distributed::rpc::ForkId;
  using RRefId = torch::distributed::rpc::RRefId;

  // To be called before the request is sent.
  void add(uint64_t callId, const Peer& owner);

  // To be called when rpc.remote() has timed out. From then on torch may delete this reference.
  void giveUp(uint64_t callId, const ForkId& reference);

  // To be called with each request that deletes a reference (RREF_USER_DELETE).
  void noteDeletion(const Message& deletion);
  // Whether a deletion is to be sent again.
  bool owesAny() const;

  // To be called when the owner has answered, or never will. Returns the deletion that is to be sent again; null if
  // there is none.
  c10::intrusive_ptr<Message> take(uint64_t callId, const Peer& owner);

  // To be called when the owner is gone.
  void forget(const Peer& owner);

  bool isAwaited(uint64_t callId, const Peer& owner) const;

 private:
  struct Entry {
    const Peer* owner;
    std::optional<ForkId> reference; // once given up
    std::optional<RRefId> deleted; // once torch has deleted the reference
  };
  using Entries = std::unordered_map<uint64_t, Entry>;

  Entries::iterator eraseLocked(Entries::iterator entry);

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  Entries entries_; // by the call that makes the RRef
  std::unordered_map<ForkId, uint64_t, ForkId::Hash> givenUp_; // calls by the references that they make
};

} // namespace torch_ucx_rpc
