#include "peers/directory.h"

#include <mutex>
#include <stdexcept>

namespace torch_ucx_rpc {

namespace {

template <typename Map>
Peer* findIn(const Map& map, const typename Map::key_type& key) {
  const auto entry = map.find(key);
  return entry != map.end() ? entry->second : nullptr;
}

} // namespace

void Directory::add(Member member) {
  auto peer = std::make_unique<Peer>(std::move(member));
  const Member& added = peer->member();
  const std::unique_lock lock(mutex_);
  // Peers that are gone keep rank and name until another takes them, so that errors can name them.
  const auto refuse = [&](const char* what, const Peer* other) {
    throw std::invalid_argument(peer->describe() + " has the same " + what + " as " + other->describe());
  };
  Peer* const sameRank = findIn(byRank_, added.rank);
  Peer* const sameName = findIn(byName_, added.name);
  if (sameRank != nullptr && sameRank->isThere()) {
    refuse("rank", sameRank);
  }
  if (sameName != nullptr && sameName->isThere()) {
    refuse("name", sameName);
  }
  if (const Peer* same = findIn(bySession_, added.session); same != nullptr && same->isThere()) {
    refuse("session", same);
  }
  forgetLocked(sameRank);
  forgetLocked(sameName == sameRank ? nullptr : sameName);
  byRank_[added.rank] = peer.get();
  byName_[added.name] = peer.get();
  bySession_[added.session] = peer.get();
  peers_.push_back(std::move(peer));
}

void Directory::remove(const Peer& peer) {
  const std::unique_lock lock(mutex_);
  // Another worker may have taken the rank by now.
  if (findIn(byRank_, peer.member().rank) == &peer) {
    forgetLocked(&peer);
  }
}

// The peer stays in bySession_. So its late frames are dropped silently, while frames of a stranger cause a warning.
void Directory::forgetLocked(const Peer* peer) {
  if (peer != nullptr) {
    byRank_.erase(peer->member().rank);
    byName_.erase(peer->member().name);
  }
}

Peer* Directory::find(Rank rank) const {
  const std::shared_lock lock(mutex_);
  return findIn(byRank_, rank);
}

Peer* Directory::find(const std::string& name) const {
  const std::shared_lock lock(mutex_);
  return findIn(byName_, name);
}

Peer* Directory::findSession(uint64_t session) const {
  const std::shared_lock lock(mutex_);
  return findIn(bySession_, session);
}

RpcFailure Directory::unknown(const std::string& which, RpcFailure::Details details) const {
  const std::shared_lock lock(mutex_);
  std::string names;
  for (const auto& [rank, peer] : byRank_) {
    names += (names.empty() ? "" : ", ") + peer->member().name + " (rank " + std::to_string(rank) + ")";
  }
  return {
      RpcFailure::Kind::kUnknownWorker,
      "could not find destination worker " + which + ". The workers are: " + names,
      std::move(details)};
}

Peer& Directory::at(Rank rank) const {
  Peer* const peer = find(rank);
  return peer != nullptr ? *peer : throw unknown("with rank " + std::to_string(rank), {.rank = rank});
}

Peer& Directory::at(const std::string& name) const {
  Peer* const peer = find(name);
  return peer != nullptr ? *peer : throw unknown("'" + name + "'", {.name = name});
}

Peer& Directory::at(Rank rank, const std::string& name) const {
  Peer* const peer = find(rank);
  if (peer == nullptr || peer->member().name != name) {
    throw unknown("'" + name + "' with rank " + std::to_string(rank), {.name = name, .rank = rank});
  }
  return *peer;
}

Rank Directory::endOfRanks() const {
  const std::shared_lock lock(mutex_);
  return byRank_.empty() ? Rank{0} : static_cast<Rank>(byRank_.rbegin()->first + 1);
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
