#include "peers/barrier.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// A worker can be one round behind its parent at most, since it takes part in each.
constexpr size_t kResultsKept = 4;

} // namespace

template <typename Look>
std::optional<Rank> Barrier::findBelow(Rank top, const Look& look) const {
  const int end = link_.endOfRanks();
  // Ranks at the same distance below `top` follow one another.
  for (int first = top, last = top; first < end; first = first * fanOut_ + 1, last = last * fanOut_ + fanOut_) {
    for (int rank = first; rank <= last && rank < end; ++rank) {
      if (look(static_cast<Rank>(rank))) {
        return static_cast<Rank>(rank);
      }
    }
  }
  return std::nullopt;
}

std::optional<Rank> Barrier::parentLocked() const {
  for (int above = self_; above != 0;) {
    above = (above - 1) / fanOut_;
    if (link_.isPresent(static_cast<Rank>(above))) {
      return static_cast<Rank>(above);
    }
  }
  for (Rank rank = 0; rank < self_; ++rank) {
    if (link_.isPresent(rank)) {
      return rank;
    }
  }
  return std::nullopt;
}

uint64_t Barrier::enter(int64_t value) {
  Outgoing outgoing;
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++entered_;
    followParentLocked(outgoing);
    if (!results_.contains(number)) {
      Round& round = rounds_[number];
      round.arrivals.values[self_] = value;
      round.isTold = false;
      proceedLocked(number, outgoing);
    }
  }
  send(outgoing);
  return number;
}

bool Barrier::wait(std::chrono::milliseconds limit, Result& result) {
  std::unique_lock lock(mutex_);
  // If a worker returned before it passed the release on, the workers below it would have to find another parent.
  const auto isReleased = [this] { return results_.contains(entered_) && passingOn_ == 0; };
  if (!released_.wait_for(lock, limit, isReleased)) {
    return false;
  }
  result = results_.at(entered_);
  return true;
}

void Barrier::tick() {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    proceedLocked(entered_, outgoing, true);
  }
  send(outgoing);
}

std::vector<Rank> Barrier::missing() const {
  const std::lock_guard lock(mutex_);
  std::vector<Rank> missing;
  if (const auto round = rounds_.find(entered_); round != rounds_.end()) {
    const bool isCoordinator = !parentLocked().has_value();
    findBelow(isCoordinator ? 0 : self_, [&](Rank rank) {
      if (isAwaitedLocked(rank, round->second, isCoordinator)) {
        missing.push_back(rank);
      }
      return false;
    });
  }
  return missing;
}

std::vector<Rank> Barrier::toContact() const {
  const std::lock_guard lock(mutex_);
  std::vector<Rank> ranks;
  const auto entry = rounds_.find(entered_);
  if (entry == rounds_.end()) {
    return ranks;
  }
  const Round& round = entry->second;
  const bool isCoordinator = !parentLocked().has_value();
  const auto isAwaited = [&](Rank rank) { return isAwaitedLocked(rank, round, isCoordinator); };
  const int end = link_.endOfRanks();
  // The children of a gone worker have become this worker's.
  std::vector<int> tops = {isCoordinator ? 0 : self_};
  while (!tops.empty()) {
    const int top = tops.back();
    tops.pop_back();
    for (int below = top * fanOut_ + 1; below <= top * fanOut_ + fanOut_ && below < end; ++below) {
      const auto rank = static_cast<Rank>(below);
      if (rank == self_ || !link_.isPresent(rank)) {
        tops.push_back(below);
      } else if (findBelow(rank, isAwaited).has_value()) {
        ranks.push_back(rank);
      }
    }
  }
  if (isCoordinator) {
    std::copy_if(round.arrivals.gone.begin(), round.arrivals.gone.end(), std::back_inserter(ranks), isAwaited);
  }
  return ranks;
}

bool Barrier::isAwaitedLocked(Rank rank, const Round& round, bool isCoordinator) const {
  return link_.isPresent(rank) && !round.arrivals.values.contains(rank) &&
      (isCoordinator || !round.arrivals.gone.contains(rank));
}

// Sends a new parent the last result: the previous parent may have died while it released that round, and perhaps only
// this worker has got the release.
void Barrier::followParentLocked(Outgoing& outgoing) {
  const std::optional<Rank> parent = parentLocked();
  const bool isNew = parent.has_value() && parent != parent_;
  parent_ = parent;
  if (isNew && !results_.empty()) {
    outgoing.releases.push_back({*parent, results_.rbegin()->first, results_.rbegin()->second});
  }
}

void Barrier::proceedLocked(uint64_t number, Outgoing& outgoing, bool isTick) {
  const auto entry = rounds_.find(number);
  if (entry == rounds_.end()) {
    return;
  }
  Round& round = entry->second;
  const std::optional<Rank> parent = parentLocked();
  const bool isCoordinator = !parent.has_value();
  const auto isAwaited = [&](Rank rank) { return isAwaitedLocked(rank, round, isCoordinator); };
  if (!round.absent.has_value() || !isAwaited(*round.absent)) {
    round.absent = findBelow(isCoordinator ? 0 : self_, isAwaited);
  }
  const bool isComplete = !round.absent.has_value();
  if (isCoordinator && isComplete) {
    Result result;
    for (const auto& [rank, value] : round.arrivals.values) {
      result.sum += link_.isPresent(rank) ? value : 0;
    }
    result.lost = link_.lost();
    releaseLocked(number, result, std::nullopt, outgoing);
  } else if (!isCoordinator && (isComplete || isTick) && !round.isTold && round.arrivals.values.contains(self_)) {
    findBelow(self_, [&](Rank rank) {
      if (!link_.isPresent(rank) && !round.arrivals.values.contains(rank)) {
        round.arrivals.gone.insert(rank);
      }
      return false;
    });
    round.isTold = true;
    outgoing.arrives.push_back({*parent, number, round.arrivals});
  }
}

// The first result stays.
void Barrier::releaseLocked(uint64_t number, const Result& result, std::optional<Rank> from, Outgoing& outgoing) {
  if (!results_.try_emplace(number, result).second) {
    return;
  }
  std::set<Rank> others = std::move(rounds_[number].senders);
  if (const std::optional<Rank> parent = parentLocked(); parent.has_value()) {
    others.insert(*parent); // the parent may be new, and not know the result yet
  }
  for (const Rank rank : others) {
    if (rank != from && link_.isPresent(rank)) {
      outgoing.releases.push_back({rank, number, result});
    }
  }
  rounds_.erase(number);
  while (results_.size() > kResultsKept) {
    results_.erase(results_.begin());
  }
  ++passingOn_;
  ++outgoing.roundsOver;
}

void Barrier::onArrive(Rank from, uint64_t number, const Arrivals& arrivals) {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = results_.find(number); known != results_.end()) {
      // The sender has not got the release.
      if (link_.isPresent(from)) {
        outgoing.releases.push_back({from, number, known->second});
      }
    } else {
      Round& round = rounds_[number];
      round.senders.insert(from);
      round.arrivals.values.insert(arrivals.values.begin(), arrivals.values.end());
      round.arrivals.gone.insert(arrivals.gone.begin(), arrivals.gone.end());
      round.isTold = false;
      proceedLocked(number, outgoing);
    }
  }
  send(outgoing);
}

void Barrier::onRelease(Rank from, uint64_t number, const Result& result) {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    releaseLocked(number, result, from, outgoing);
  }
  send(outgoing);
}

void Barrier::onMembershipChange() {
  Outgoing outgoing;
  {
    const std::lock_guard lock(mutex_);
    if (entered_ != 0) {
      followParentLocked(outgoing);
    }
    std::vector<uint64_t> open; // a release erases its round
    for (auto& [number, round] : rounds_) {
      open.push_back(number);
      round.isTold = false;
    }
    for (const uint64_t number : open) {
      proceedLocked(number, outgoing);
    }
  }
  send(outgoing);
}

void Barrier::send(const Outgoing& outgoing) {
  for (const Outgoing::Arrive& arrive : outgoing.arrives) {
    link_.sendArrive(arrive.to, arrive.round, arrive.arrivals);
  }
  for (const Outgoing::Release& release : outgoing.releases) {
    link_.sendRelease(release.to, release.round, release.result);
  }
  if (outgoing.roundsOver != 0) {
    const std::lock_guard lock(mutex_);
    passingOn_ -= outgoing.roundsOver;
    released_.notify_all();
  }
}

} // namespace torch_ucx_rpc
