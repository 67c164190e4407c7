#include "peers/barrier.h"

#include <algorithm>
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

uint64_t Barrier::enter(int64_t value) {
  Outgoing outgoing;
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    round = ++entered_;
    value_ = value;
    arriveLocked(self_, round, value, outgoing);
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
  const Peer* coordinator = coordinatorLocked();
  if (coordinator == nullptr || coordinator->member().rank != self_) {
    return {};
  }
  std::vector<Peer*> missing = directory_.present();
  if (const auto round = rounds_.find(entered_); round != rounds_.end()) {
    std::erase_if(missing, [&](Peer* peer) { return round->second.arrived.contains(peer->member().rank); });
  }
  return missing;
}

void Barrier::noteFailedLocked() {
  for (const Peer* peer : directory_.all()) {
    if (peer->state() == Peer::State::kFailed && std::find(failed_.begin(), failed_.end(), peer) == failed_.end()) {
      failed_.push_back(peer);
    }
  }
}

// Sends this worker's own arrival to the coordinator, if that is another worker. Records any other arrival here.
void Barrier::arriveLocked(Rank rank, uint64_t round, int64_t value, Outgoing& outgoing) {
  Peer* coordinator = coordinatorLocked();
  if (coordinator != nullptr && coordinator->member().rank != self_ && rank == self_) {
    outgoing.arriveAt = coordinator;
    outgoing.round = round;
    outgoing.value = value;
    return;
  }
  if (const auto known = results_.find(round); known != results_.end()) {
    // This coordinator, or one before it, has released the round. The worker that reports has not heard of it.
    if (Peer* peer = directory_.find(rank); peer != nullptr && rank != self_) {
      outgoing.releases.push_back({peer, {round, known->second}});
    }
    return;
  }
  rounds_[round].arrived[rank] = value;
  releaseIfCompleteLocked(round, outgoing);
}

void Barrier::releaseIfCompleteLocked(uint64_t round, Outgoing& outgoing) {
  const auto entry = rounds_.find(round);
  const Peer* coordinator = coordinatorLocked();
  if (entry == rounds_.end() || coordinator == nullptr || coordinator->member().rank != self_) {
    return;
  }
  const std::map<Rank, int64_t>& arrived = entry->second.arrived;
  Result result;
  const std::vector<Peer*> present = directory_.present();
  noteFailedLocked(); // in this order: a worker that fails meanwhile is in both lists, and not taken for one that left
  if (!failed_.empty()) {
    // Also where the dead worker had arrived: the others would wait for it at the next point, which it never reaches.
    result.error = failed_.front()->whyGone();
  } else {
    for (const Peer* peer : present) {
      if (!arrived.contains(peer->member().rank)) {
        return;
      }
    }
    for (const auto& [rank, value] : arrived) {
      result.sum += value;
    }
  }
  for (Peer* peer : present) {
    if (peer->member().rank != self_ && (result.error || arrived.contains(peer->member().rank))) {
      outgoing.releases.push_back({peer, {round, result}});
    }
  }
  rounds_.erase(entry);
  results_[round] = std::move(result);
  while (results_.size() > kResultsKept) {
    results_.erase(results_.begin());
  }
  released_.notify_all();
}

void Barrier::onArrive(Peer& from, uint64_t round, int64_t value) {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    arriveLocked(from.member().rank, round, value, outgoing);
  }
  send(outgoing);
}

void Barrier::onRelease(uint64_t round, Result result) {
  const std::lock_guard lock(mutex_);
  // The first result stays: a coordinator that took over may have released the round once more.
  results_.try_emplace(round, std::move(result));
  while (results_.size() > kResultsKept) {
    results_.erase(results_.begin());
  }
  released_.notify_all();
}

void Barrier::onMembershipChange() {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    noteFailedLocked();
    std::vector<uint64_t> open; // a release erases its round
    for (const auto& [round, arrivals] : rounds_) {
      open.push_back(round);
    }
    for (const uint64_t round : open) {
      releaseIfCompleteLocked(round, outgoing);
    }
    if (entered_ != 0 && !results_.contains(entered_)) {
      arriveLocked(self_, entered_, value_, outgoing); // again: the coordinator may be another one now
    }
  }
  send(outgoing);
}

void Barrier::send(const Outgoing& outgoing) {
  if (outgoing.arriveAt != nullptr) {
    link_.sendArrive(*outgoing.arriveAt, outgoing.round, outgoing.value);
  }
  for (const auto& [peer, release] : outgoing.releases) {
    link_.sendRelease(*peer, release.first, release.second);
  }
}

} // namespace torch_ucx_rpc
