#include "rpc/unmade_rrefs.h"

#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

void UnmadeRRefs::add(uint64_t callId, const Peer& owner) {
  const std::lock_guard lock(mutex_);
  entries_.emplace(callId, Entry{&owner, std::nullopt, nullptr});
}

void UnmadeRRefs::giveUp(uint64_t callId, const ForkId& reference) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(callId);
  if (entry != entries_.end()) { // the owner has not answered since
    entry->second.reference.emplace(reference);
    givenUp_.emplace(reference, callId);
  }
}

bool UnmadeRRefs::keep(const c10::intrusive_ptr<Message>& deletion) {
  const std::lock_guard lock(mutex_);
  if (givenUp_.empty()) { // as nearly always: the message need not be read
    return false;
  }
  const auto call = givenUp_.find(rpc::ForkMessageBase::fromMessage(*deletion, deletion->type()).second);
  if (call == givenUp_.end()) {
    return false;
  }
  entries_.at(call->second).deletion = deletion;
  return true;
}

bool UnmadeRRefs::keepsAny() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      givenUp_, [this](const auto& call) { return entries_.at(call.second).deletion != nullptr; });
}

c10::intrusive_ptr<Message> UnmadeRRefs::take(uint64_t callId, const Peer& owner) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(callId);
  if (entry == entries_.end() || entry->second.owner != &owner) {
    return nullptr;
  }
  c10::intrusive_ptr<Message> deletion = std::move(entry->second.deletion);
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
