#include "rpc/group.h"

#include "base/warnings.h"
#include "torch_glue/torch_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kForEver = Clock::time_point::max();
// For how long a thread in join() waits for owners that are still making RRefs whose references torch has deleted here.
// If an owner gets the deletions too late, torch complains about leaks.
constexpr auto kDeletionPatience = std::chrono::seconds(5);
// How often a thread in join() looks whether calls have ended.
constexpr auto kPoll = std::chrono::milliseconds(1);

Clock::time_point deadlineOf(std::chrono::milliseconds timeout) {
  return timeout.count() != 0 ? Clock::now() + timeout : kForEver;
}

} // namespace

Group::Group(
    const AgentParts& parts,
    const RpcAgent& agent,
    CallClient& calls,
    PeerMonitor& monitor,
    OrphanedState& orphans,
    std::function<void()> whileWaiting)
    : AgentParts(parts),
      agent_(agent),
      calls_(calls),
      monitor_(monitor),
      orphans_(orphans),
      whileWaiting_(std::move(whileWaiting)),
      barrier_(self_.rank, *this) {}

// ---------------------------------------------------------------------------------------------------- members

void Group::addMembers(std::vector<Member> members) {
  for (Member& member : members) {
    if (isTorchsAgent(agent_)) {
      invalidateRRefsOf(member.rank); // of a worker that had this rank before
    }
    directory_.add(std::move(member));
  }
  const Peer* self = directory_.findSession(self_.session);
  TORCH_CHECK(self != nullptr, "worker '", self_.name, "' is not among the members that were added");
  const std::vector<Peer*> present = directory_.present();
  for (Peer* peer : present) {
    if (peer != self && peer->member().bootId == self->member().bootId) { // both run on this machine
      peer->isNeighbour.store(true);
      if (peer->member().pidNamespace != self->member().pidNamespace || peer->member().user != self->member().user) {
        peer->isOverNetwork.store(true);
      }
    }
  }
  onSizeChange();
  monitor_.watch(self->member(), present);
}

void Group::onSizeChange() {
  const std::vector<Peer*> present = directory_.present();
  const auto neighbours = std::ranges::count_if(present, [](const Peer* peer) { return peer->isNeighbour.load(); });
  // The size sets each sender's share of what may be pushed into a worker. Threads spin only if each worker of the
  // machine has a core.
  messenger_.setGroupSize(present.size(), 1 + static_cast<size_t>(neighbours));
}

void Group::removeMember(uint64_t session) {
  if (Peer* peer = directory_.findSession(session)) {
    if (peer->isThere()) {
      // The peer may be leaving, and wait for this worker's acknowledgment. The goodbye ends that wait.
      messenger_.postControl(*peer, goodbyeToLost());
    }
    monitor_.end(*peer, Peer::State::kLeft, {ErrorCode::kShutDown, peer->describe() + " has left the group"});
    directory_.remove(*peer);
  }
}

const WorkerInfo& Group::infoOf(const Peer& peer) const {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<const WorkerInfo>& info = infos_[&peer];
  if (info == nullptr) {
    info = std::make_unique<const WorkerInfo>(peer.member().name, peer.member().rank);
  }
  return *info;
}

const WorkerInfo& Group::info(const std::string& name) const {
  return infoOf(directory_.at(name));
}

const WorkerInfo& Group::info(Rank rank) const {
  return infoOf(directory_.at(rank));
}

std::vector<WorkerInfo> Group::infos() const {
  std::vector<WorkerInfo> infos;
  for (const Peer* peer : isDynamic() ? directory_.present() : directory_.all()) {
    infos.push_back(infoOf(*peer));
  }
  return infos;
}

void Group::setOnGone(OnGone onGone) {
  std::shared_ptr<const OnGone> replaced; // destroyed without the lock
  const std::lock_guard lock(mutex_);
  replaced = std::exchange(onGone_, onGone ? std::make_shared<const OnGone>(std::move(onGone)) : nullptr);
}

void Group::onPeerGone(Peer& peer) {
  barrier_.onMembershipChange();
  onSizeChange();
  std::shared_ptr<const OnGone> onGone;
  {
    const std::lock_guard lock(mutex_);
    onGone = onGone_;
  }
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    return; // being destroyed
  }
  if (onGone != nullptr) {
    // Handlers may wait for the callback, and hold all threads until it has run. So it does not queue behind them.
    executor_.addCompletion([hold, &peer, onGone = std::move(onGone)] {
      try {
        (*onGone)(peer);
      } catch (const std::exception& error) {
        warn("a callback for the end of " + peer.describe() + " has failed: " + error.what());
      }
    });
  }
  if (isDynamic() && peer.state() == Peer::State::kFailed) {
    // This is a separate task, because the Store may be out of reach.
    executor_.addRequest([this, hold = std::move(hold), &peer] {
      try {
        membership_.onLost(peer.member().session);
      } catch (const std::exception& error) {
        warn("could not take " + peer.describe() + " off the list of members: " + error.what());
      }
    });
  }
}

// -------------------------------------------------------------------------------------------------- barriers

bool Group::isPresent(Rank rank) const {
  const Peer* peer = directory_.find(rank);
  return peer != nullptr && peer->state() == Peer::State::kPresent;
}

Rank Group::endOfRanks() const {
  return directory_.endOfRanks();
}

Error Group::lost() const {
  std::string sentence;
  for (const Peer* peer : directory_.all()) {
    if (peer->state() == Peer::State::kFailed) {
      sentence += (sentence.empty() ? "" : "; ") + peer->whyGone().message();
    }
  }
  return sentence.empty() ? Error() : Error(ErrorCode::kPeerFailed, sentence);
}

void Group::sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) {
  if (Peer* peer = directory_.find(to)) {
    messenger_.postControl(*peer, barrierArrive(round, arrivals));
  }
}

void Group::sendRelease(Rank to, uint64_t round, const Barrier::Result& result) {
  if (Peer* peer = directory_.find(to)) {
    messenger_.postControl(*peer, barrierRelease(round, result));
  }
}

void Group::onBarrierArrive(Peer& from, uint64_t round, const Barrier::Arrivals& arrivals) {
  barrier_.onArrive(from.member().rank, round, arrivals);
}

void Group::onBarrierRelease(Peer& from, uint64_t round, const Barrier::Result& result) {
  barrier_.onRelease(from.member().rank, round, result);
}

Barrier::Result Group::barrier(int64_t value, std::chrono::milliseconds timeout) {
  return barrier(value, deadlineOf(timeout), timeout);
}

Barrier::Result Group::barrier(int64_t value, Clock::time_point deadline, std::chrono::milliseconds timeout) {
  barrier_.enter(value);
  Barrier::Result result;
  while (!barrier_.wait(kSignalCheckPeriod, result)) {
    whileWaiting_();
    barrier_.tick();
    // The heartbeat checks peers that this worker has an endpoint to, and a ping makes one. Otherwise a missing peer
    // that dies on another machine would go unnoticed.
    for (const Rank rank : barrier_.toContact()) {
      Peer* peer = directory_.find(rank);
      if (peer != nullptr && peer->needsHeartbeat.load() && !peer->isMet.load()) {
        messenger_.postControl(*peer, {wire::Kind::kPing});
      }
    }
    if (lifetime_.isClosed()) {
      throw RpcFailure(
          RpcFailure::Kind::kShutDown,
          "RPC was shut down on worker '" + self_.name + "' while it waited for the others");
    }
    if (Clock::now() >= deadline) {
      std::string missing;
      for (const Rank rank : barrier_.missing()) {
        const Peer* peer = directory_.find(rank);
        if (peer != nullptr) {
          missing += (missing.empty() ? "; missing: " : ", ") + peer->describe();
        }
      }
      throw RpcFailure(
          RpcFailure::Kind::kBarrierFailed,
          "worker '" + self_.name + "' waited " + std::to_string(timeout.count()) +
              " ms for all workers to come to the same point" + missing);
    }
  }
  return result;
}

// Ends after two rounds in a row in which no worker had a call open, nor opened one in between. One round is not
// enough: a worker that has not reported may still call one that has.
void Group::join(std::chrono::milliseconds timeout, std::chrono::milliseconds defaultTimeout) {
  if (isDynamic()) {
    leave(timeout.count() != 0 ? timeout : defaultTimeout);
    return;
  }
  const auto deadline = deadlineOf(timeout);
  const auto patience = std::min(deadline, Clock::now() + kDeletionPatience);
  uint64_t openedBefore = ~0ull;
  Error lost;
  for (int quietRounds = 0; quietRounds < 2;) {
    while ((calls_.open() != 0 && Clock::now() < deadline) || (calls_.owesDeletions() && Clock::now() < patience)) {
      whileWaiting_();
      std::this_thread::sleep_for(kPoll);
    }
    const uint64_t opened = calls_.opened();
    const bool isQuiet = calls_.open() == 0 && (quietRounds == 0 || opened == openedBefore);
    openedBefore = opened;
    Barrier::Result result = barrier(isQuiet ? 0 : 1, deadline, timeout);
    quietRounds = result.sum == 0 ? quietRounds + 1 : 0;
    lost = std::move(result.lost); // all workers agree on it in the last round
  }
  monitor_.setEverybodyLeaving();
  if (lost) {
    throw RpcFailure(
        RpcFailure::Kind::kBarrierFailed,
        "the shutdown is over, but not all workers have come to it: " + lost.message(),
        {.cause = lost.message()});
  }
}

// --------------------------------------------------------------------------------------------- dynamic groups

void Group::setMembership(Membership membership, const std::string& joinKey) {
  membership_ = std::move(membership);
  orphans_.setDynamic();
  messenger_.acceptJoins(joinKey);
}

void Group::announceJoin(const std::string& record, const std::vector<uint64_t>& members) {
  for (const uint64_t session : members) {
    if (Peer* peer = directory_.findSession(session); peer != nullptr && peer->isThere()) {
      peer->hasAdmitted.store(false); // first: the acknowledgment may come at once
      messenger_.postControl(*peer, {wire::Kind::kJoin, 0, Bytes(std::as_bytes(std::span(record)))});
    }
  }
}

std::vector<WorkerInfo> Group::unadmitted() const {
  return without(&Peer::hasAdmitted);
}

std::vector<WorkerInfo> Group::without(std::atomic<bool> Peer::* done) const {
  std::vector<WorkerInfo> infos;
  for (const Peer* peer : directory_.all()) {
    if (peer->isThere() && !(peer->*done).load()) {
      infos.push_back(infoOf(*peer));
    }
  }
  return infos;
}

void Group::onJoin(uint64_t session, Bytes record) {
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    return; // being destroyed
  }
  // Python decides, which needs the GIL. This thread may drive, and no driver waits for the GIL, so another thread asks
  // Python. The task is a completion: a request would wait for a thread while handlers hold all of them.
  executor_.addCompletion([this, hold = std::move(hold), session, record = std::move(record)] {
    if (lifetime_.isClosed()) {
      return; // this worker leaves
    }
    // A known worker repeats its join: the answer has not reached it.
    if (directory_.findSession(session) == nullptr) {
      const auto* text = reinterpret_cast<const char*>(record.data());
      try {
        membership_.onJoin({text, record.size()});
      } catch (const std::exception& error) {
        warn("worker '" + self_.name + "' does not admit a process that wants to join the group: " + error.what());
        return;
      }
    }
    if (Peer* peer = directory_.findSession(session); peer != nullptr) {
      // It may have been lost since it was admitted.
      messenger_.postControl(*peer, peer->isThere() ? ControlFrame{wire::Kind::kAcknowledge} : goodbyeToLost());
    }
  });
}

void Group::onAcknowledge(Peer& from) {
  if (from.hasAdmitted.load()) {
    from.hasNotedLeave.store(true);
  } else {
    messenger_.onAdmitted(from);
  }
}

void Group::onLeave(Peer& from) {
  // The state first: a peer whose leave is acknowledged expects no more calls.
  from.moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, from.describe() + " is leaving the group"});
  messenger_.postControl(from, {wire::Kind::kAcknowledge});
}

int64_t Group::requestsOpen() const {
  // Requests of peers that are gone do not count, since torch may never answer them. One example is a backward pass
  // whose context was closed when the worker died that had opened it.
  int64_t sum = 0;
  for (const Peer* peer : directory_.all()) {
    sum += peer->isThere() ? peer->requestsOpen.load() : 0;
  }
  return sum;
}

bool Group::hasAnsweredAll() const {
  // The transport is asked last, because the answer to a request is posted before the request stops counting as open.
  return calls_.open() == 0 && requestsOpen() == 0 && messenger_.traffic().underWay == 0;
}

// Tells the others first. They then make no more calls to this worker, and it answers every call made before.
void Group::leave(std::chrono::milliseconds timeout) {
  const auto deadline = deadlineOf(timeout);
  for (Peer* peer : directory_.all()) {
    // Peers that have not admitted this worker get only its goodbye.
    if (peer->member().session != self_.session && peer->isThere() && peer->hasAdmitted.load()) {
      peer->hasNotedLeave.store(false); // first: the acknowledgment may come at once
      messenger_.postControl(*peer, {wire::Kind::kLeave});
    }
  }
  while (true) {
    whileWaiting_();
    const std::vector<WorkerInfo> silent = without(&Peer::hasNotedLeave);
    if (silent.empty() && hasAnsweredAll()) {
      return;
    }
    if (Clock::now() >= deadline) {
      std::string names;
      for (const WorkerInfo& info : silent) {
        names += (names.empty() ? "; not acknowledged by " : ", ") + info.name_;
      }
      throw RpcFailure(
          RpcFailure::Kind::kBarrierFailed,
          "worker '" + self_.name + "' has tried to leave the group for " + std::to_string(timeout.count()) +
              " ms: " + std::to_string(calls_.open()) + " of its calls are open, and it has " +
              std::to_string(requestsOpen()) + " requests to answer" + names);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

} // namespace torch_ucx_rpc
