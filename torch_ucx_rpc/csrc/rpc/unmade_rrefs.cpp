#include "rpc/unmade_rrefs.h"

#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

void UnmadeRRefs::add(uint64_t callId, const Peer& owner) {
  const std::lock_guard lock(mutex_);
  entries_.emplace(callId, Entry{&owner, std::nullopt, std::nullopt});
}

void UnmadeRRefs::giveUp(uint64_t callId, const ForkId& reference) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(callId);
  if (entry != entries_.end()) { // the owner has not answered since
    entry->second.reference.emplace(reference);
    givenUp_.emplace(reference, callId);
  }
}

void UnmadeRRefs::noteDeletion(const Message& deletion) {
  const std::lock_guard lock(mutex_);
  if (givenUp_.empty()) { // as nearly always: the message need not be read
    return;
  }
  const auto [rref, reference] = rpc::ForkMessageBase::fromMessage(deletion, deletion.type());
  const auto call = givenUp_.find(reference);
  if (call != givenUp_.end()) {
    entries_.at(call->second).deleted.emplace(rref);
  }
}

bool UnmadeRRefs::owesAny() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      givenUp_, [this](const auto& call) { return entries_.at(call.second).deleted.has_value(); });
}

c10::intrusive_ptr<Message> UnmadeRRefs::take(uint64_t callId, const Peer& owner) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(callId);
  if (entry == entries_.end() || entry->second.owner != &owner) {
    return nullptr;
  }
  c10::intrusive_ptr<Message> deletion;
  if (entry->second.deleted) {
    deletion = rpc::RRefUserDelete(*entry->second.deleted, *entry->second.reference).toMessage();
  }
  eraseLocked(entry);
  return deletion;
}

void UnmadeRRefs::forget(const Peer& owner) {
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    entry = entry->second.owner == &owner ? eraseLocked(entry) : std::next(entry);
  }
}

bool UnmadeRRefs::isAwaited(uint64_t callId, const Peer& owner) const {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(callId);
  return entry != entries_.end() && entry->second.owner == &owner;
}

UnmadeRRefs::Entries::iterator UnmadeRRefs::eraseLocked(Entries::iterator entry) {
  if (entry->second.reference) {
    givenUp_.erase(*entry->second.reference);
  }
  return entries_.erase(entry);
}

} // namespace torch_ucx_rpc
