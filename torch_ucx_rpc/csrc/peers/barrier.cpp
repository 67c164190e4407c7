#include "peers/barrier.h"

#include <algorithm>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// A worker can be one round behind the coordinator at most, since it takes part in each.
constexpr size_t kResultsKept = 4;

} // namespace

// When a coordinator ends, all workers see that. So they agree on the next one without an election.
Peer* Barrier::coordinatorLocked() const {
  const std::vector<Peer*> present = directory_.present();
  return present.empty() ? nullptr : present.front();
}

bool Barrier::isCoordinatorLocked() const {
  const Peer* coordinator = coordinatorLocked();
  return coordinator != nullptr && coordinator->member().rank == self_;
}

Error Barrier::lostLocked() const {
  std::string sentence;
  for (const Peer* peer : directory_.all()) {
    if (peer->state() == Peer::State::kFailed) {
      sentence += (sentence.empty() ? "" : "; ") + peer->whyGone().message();
    }
  }
  return sentence.empty() ? Error() : Error(ErrorCode::kPeerFailed, sentence);
}

uint64_t Barrier::enter(int64_t value) {
  Outgoing outgoing;
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    round = ++entered_;
    value_ = value;
    arriveLocked(outgoing);
  }
  send(outgoing);
  return round;
}

bool Barrier::wait(std::chrono::milliseconds limit, Result& result) {
  std::unique_lock lock(mutex_);
  const auto isReleased = [this] { return results_.contains(entered_); };
  if (!released_.wait_for(lock, limit, isReleased)) {
    return false;
  }
  result = results_.at(entered_);
  return true;
}

std::vector<Peer*> Barrier::missing() const {
  const std::lock_guard lock(mutex_);
  if (!isCoordinatorLocked()) {
    return {};
  }
  std::vector<Peer*> missing = directory_.present();
  if (const auto round = rounds_.find(entered_); round != rounds_.end()) {
    std::erase_if(missing, [&](Peer* peer) { return round->second.contains(peer->member().rank); });
  }
  return missing;
}

void Barrier::arriveLocked(Outgoing& outgoing) {
  Peer* coordinator = coordinatorLocked();
  coordinator_ = coordinator;
  if (isCoordinatorLocked()) {
    recordLocked(self_, entered_, value_, outgoing);
  } else if (coordinator != nullptr) {
    outgoing.arriveAt = coordinator;
    outgoing.round = entered_;
    outgoing.value = value_;
  }
}

void Barrier::recordLocked(Rank rank, uint64_t round, int64_t value, Outgoing& outgoing) {
  if (const auto known = results_.find(round); known != results_.end()) {
    // The sender has not heard of the release.
    if (Peer* peer = directory_.find(rank); peer != nullptr && rank != self_) {
      outgoing.releases.push_back({peer, round, known->second});
    }
    return;
  }
  rounds_[round][rank] = value;
  releaseIfCompleteLocked(round, outgoing);
}

void Barrier::releaseIfCompleteLocked(uint64_t round, Outgoing& outgoing) {
  const auto entry = rounds_.find(round);
  if (entry == rounds_.end() || !isCoordinatorLocked()) {
    return;
  }
  Result result;
  for (const Peer* peer : directory_.present()) {
    const auto arrived = entry->second.find(peer->member().rank);
    if (arrived == entry->second.end()) {
      return;
    }
    result.sum += arrived->second;
  }
  result.lost = lostLocked();
  releaseLocked(round, result, outgoing);
}

// The first result stays.
void Barrier::releaseLocked(uint64_t round, const Result& result, Outgoing& outgoing) {
  if (!results_.try_emplace(round, result).second) {
    return;
  }
  for (const auto& [rank, value] : rounds_[round]) {
    if (Peer* peer = directory_.find(rank); peer != nullptr && rank != self_ && peer->isThere()) {
      outgoing.releases.push_back({peer, round, result});
    }
  }
  rounds_.erase(round);
  while (results_.size() > kResultsKept) {
    results_.erase(results_.begin());
  }
  released_.notify_all();
}

// The former coordinator may have died in the midst of releasing a round, and this worker alone knows of it.
void Barrier::tellCoordinatorLocked(Outgoing& outgoing) {
  Peer* coordinator = coordinatorLocked();
  const bool isNew = coordinator != nullptr && coordinator != coordinator_ && !isCoordinatorLocked();
  coordinator_ = coordinator;
  if (isNew && !results_.empty()) {
    outgoing.releases.push_back({coordinator, results_.rbegin()->first, results_.rbegin()->second});
  }
  if (!results_.contains(entered_)) {
    arriveLocked(outgoing);
  }
}

void Barrier::onArrive(Peer& from, uint64_t round, int64_t value) {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    recordLocked(from.member().rank, round, value, outgoing);
  }
  send(outgoing);
}

void Barrier::onRelease(uint64_t round, Result result) {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    releaseLocked(round, result, outgoing);
  }
  send(outgoing);
}

void Barrier::onMembershipChange() {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> open; // a release erases its round
    for (const auto& [round, arrivals] : rounds_) {
      open.push_back(round);
    }
    for (const uint64_t round : open) {
      releaseIfCompleteLocked(round, outgoing);
    }
    if (entered_ != 0) {
      tellCoordinatorLocked(outgoing);
    }
  }
  send(outgoing);
}

void Barrier::send(const Outgoing& outgoing) {
  if (outgoing.arriveAt != nullptr) {
    link_.sendArrive(*outgoing.arriveAt, outgoing.round, outgoing.value);
  }
  for (const Outgoing::Release& release : outgoing.releases) {
    link_.sendRelease(*release.to, release.round, release.result);
  }
}

} // namespace torch_ucx_rpc
