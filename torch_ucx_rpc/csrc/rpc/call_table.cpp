#include "rpc/call_table.h"

#include <utility>

namespace torch_ucx_rpc {

uint64_t CallTable::open(Call call, bool& isEarliest) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = nextId_++; // never used again: a late answer finds no other call
  auto deadline = deadlines_.end();
  isEarliest = false;
  if (call.deadline != Clock::time_point::max()) {
    deadline = deadlines_.emplace(call.deadline, id);
    isEarliest = deadline == deadlines_.begin();
  }
  entries_.emplace(id, Entry{std::move(call), deadline});
  return id;
}

CallTable::Call CallTable::removeLocked(Entries::iterator entry) {
  if (entry->second.deadline != deadlines_.end()) {
    deadlines_.erase(entry->second.deadline);
  }
  Call call = std::move(entry->second.call);
  entries_.erase(entry);
  return call;
}

std::optional<CallTable::Call> CallTable::take(uint64_t id, const Peer& peer) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end() || entry->second.call.to != &peer) {
    return std::nullopt;
  }
  return removeLocked(entry);
}

// Looks at all open calls: peers seldom end, and an index by peer would slow down every call.
std::vector<CallTable::Call> CallTable::takeAll(const Peer* to) {
  std::vector<Call> calls;
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (to == nullptr || entry->second.call.to == to) {
      calls.push_back(removeLocked(entry));
    }
    entry = next;
  }
  return calls;
}

std::vector<CallTable::Expired> CallTable::takeExpired(Clock::time_point now, Clock::time_point& next) {
  std::vector<Expired> expired;
  const std::lock_guard lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const uint64_t id = deadlines_.begin()->second;
    expired.push_back({id, removeLocked(entries_.find(id))});
  }
  next = deadlines_.empty() ? Clock::time_point::max() : deadlines_.begin()->first;
  return expired;
}

void CallTable::reopen(Expired expired, Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  entries_.emplace(expired.id, Entry{std::move(expired.call), deadlines_.emplace(deadline, expired.id)});
}

bool CallTable::isOpen(uint64_t id, const Peer& peer) const {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(id);
  return entry != entries_.end() && entry->second.call.to == &peer;
}

size_t CallTable::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

uint64_t CallTable::opened() const {
  const std::lock_guard lock(mutex_);
  return nextId_;
}

} // namespace torch_ucx_rpc
