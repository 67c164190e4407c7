#include "agent/directory.h"

#include <mutex>
#include <stdexcept>

namespace torch_ucx_rpc {

void Directory::add(Member member) {
  auto peer = std::make_unique<Peer>(std::move(member));
  const Member& added = peer->member();
  const std::unique_lock lock(mutex_);
  const auto refuse = [&](const char* what, const Peer* other) {
    throw std::invalid_argument(peer->describe() + " has the same " + what + " as " + other->describe());
  };
  if (const auto same = byRank_.find(added.rank); same != byRank_.end()) {
    refuse("rank", same->second);
  }
  if (const auto same = byName_.find(added.name); same != byName_.end()) {
    refuse("name", same->second);
  }
  if (const auto same = bySession_.find(added.session); same != bySession_.end()) {
    refuse("session", same->second);
  }
  byRank_[added.rank] = peer.get();
  byName_[added.name] = peer.get();
  bySession_[added.session] = peer.get();
  peers_.push_back(std::move(peer));
}

void Directory::remove(worker_id_t rank) {
  const std::unique_lock lock(mutex_);
  const auto entry = byRank_.find(rank);
  if (entry == byRank_.end()) {
    return;
  }
  Peer* peer = entry->second;
  byName_.erase(peer->member().name);
  bySession_.erase(peer->member().session);
  byRank_.erase(entry);
}

Peer* Directory::find(worker_id_t rank) const {
  const std::shared_lock lock(mutex_);
  const auto entry = byRank_.find(rank);
  return entry != byRank_.end() ? entry->second : nullptr;
}

Peer* Directory::find(const std::string& name) const {
  const std::shared_lock lock(mutex_);
  const auto entry = byName_.find(name);
  return entry != byName_.end() ? entry->second : nullptr;
}

Peer* Directory::findSession(uint64_t session) const {
  const std::shared_lock lock(mutex_);
  const auto entry = bySession_.find(session);
  return entry != bySession_.end() ? entry->second : nullptr;
}

std::string Directory::knownNamesLocked() const {
  std::string names;
  for (const auto& [rank, peer] : byRank_) {
    names += (names.empty() ? "" : ", ") + peer->member().name + " (rank " + std::to_string(rank) + ")";
  }
  return names;
}

Peer& Directory::at(worker_id_t rank) const {
  if (Peer* peer = find(rank)) {
    return *peer;
  }
  const std::shared_lock lock(mutex_);
  throw std::runtime_error(
      "could not find destination worker with rank " + std::to_string(rank) +
      ". The workers are: " + knownNamesLocked());
}

Peer& Directory::at(const std::string& name) const {
  if (Peer* peer = find(name)) {
    return *peer;
  }
  const std::shared_lock lock(mutex_);
  throw std::runtime_error("could not find destination worker '" + name + "'. The workers are: " + knownNamesLocked());
}

std::vector<Peer*> Directory::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<Peer*> peers;
  peers.reserve(byRank_.size());
  for (const auto& [rank, peer] : byRank_) {
    peers.push_back(peer);
  }
  return peers;
}

std::vector<Peer*> Directory::present() const {
  std::vector<Peer*> peers = all();
  std::erase_if(peers, [](const Peer* peer) { return peer->state() != Peer::State::kPresent; });
  return peers;
}

} // namespace torch_ucx_rpc
