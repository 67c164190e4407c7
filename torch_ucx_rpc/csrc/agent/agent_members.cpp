// Who belongs to the group: members that are added, barriers, and how workers join and leave a group that allows it.

#include "agent/agent.h"
#include "agent/torch_state.h"
#include "base/time.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace {

constexpr auto kForEver = CallTable::Clock::time_point::max();
// How often a thread that blocks in barrier() or join() looks up.
constexpr auto kLookUp = std::chrono::milliseconds(100);
constexpr auto kPoll = std::chrono::milliseconds(1);

CallTable::Clock::time_point deadlineOf(std::chrono::milliseconds timeout) {
  return timeout.count() != 0 ? CallTable::Clock::now() + timeout : kForEver;
}

} // namespace

// ---------------------------------------------------------------------------------------------------- members

void UcxRpcAgent::addMembers(std::vector<Member> members) {
  for (Member& member : members) {
    if (isTorchsAgent() && directory_.findSession(member.session) == nullptr) {
      forsakeRRefsOf(member.rank); // of any that had it before
    }
    directory_.add(std::move(member));
  }
  const Peer* self = directory_.findSession(session_);
  TORCH_CHECK(self != nullptr, "worker '", workerInfo_.name_, "' was not told of itself");
  const std::vector<Peer*> present = directory_.present();
  size_t processesHere = 1;
  for (Peer* peer : present) {
    if (peer != self && peer->member().bootId == self->member().bootId) { // of one boot of one machine
      peer->isNeighbour.store(true);
      ++processesHere;
    }
  }
  progress_->setProcessesHere(processesHere);
  for (Peer* peer : present) {
    if (peer == self || peer->isWatched.exchange(true)) {
      continue;
    }
    const Error ended(ErrorCode::kPeerFailed, "its process has ended");
    const ProcessWatch::Outcome outcome = processes_.add(peer->member(), self->member(), [this, peer, ended] {
      takeInWithWorkerLock(); // what it has sent before
      progress_->deliveries().failures.push_back({peer, ended});
    });
    if (outcome == ProcessWatch::Outcome::kHasEnded) {
      onPeerGone(*peer, Peer::State::kFailed, peer->lost(ended));
    } else if (outcome == ProcessWatch::Outcome::kNotPossible && heartbeat_.isOn()) {
      peer->needsHeartbeat.store(true);
      if (!hasHeartbeats_.exchange(true)) {
        timer_.dueBy(Timer::Clock::now() + heartbeat_.period());
      }
    }
  }
}

void UcxRpcAgent::removeMember(uint64_t session) {
  if (Peer* peer = directory_.findSession(session)) {
    if (peer->isThere()) {
      postControl(*peer, wire::Kind::kGoodbye, 0, {}); // it may be leaving, and wait for us, who hear it no more
    }
    onPeerGone(*peer, Peer::State::kLeft, {ErrorCode::kShutDown, peer->describe() + " has left the group"});
    directory_.remove(*peer);
  }
}

void UcxRpcAgent::loseMember(uint64_t session) {
  if (Peer* peer = directory_.findSession(session); peer != nullptr && peer->isThere()) {
    postControl(*peer, wire::Kind::kGoodbye, 0, {});
    onPeerGone(*peer, Peer::State::kFailed, peer->lost({ErrorCode::kPeerFailed, "it has not admitted this worker"}));
  }
}

const WorkerInfo& UcxRpcAgent::getWorkerInfo(const std::string& name) const {
  return directory_.at(name).info();
}

const WorkerInfo& UcxRpcAgent::getWorkerInfo(worker_id_t rank) const {
  return directory_.at(rank).info();
}

std::vector<WorkerInfo> UcxRpcAgent::getWorkerInfos() const {
  std::vector<WorkerInfo> infos;
  for (const Peer* peer : isDynamic() ? directory_.present() : directory_.all()) {
    infos.push_back(peer->info());
  }
  return infos;
}

// -------------------------------------------------------------------------------------------------- barriers

int64_t UcxRpcAgent::barrier(int64_t value, std::chrono::milliseconds timeout) {
  checkProcess();
  const auto deadline = deadlineOf(timeout);
  barrier_.enter(value);
  Barrier::Result result;
  for (bool isFirstLook = true; !barrier_.wait(kLookUp, result); isFirstLook = false) {
    whileWaiting_();
    if (isFirstLook) {
      // Who has not been spoken to is not missed when it dies on another machine.
      for (Peer* peer : barrier_.missing()) {
        if (peer->needsHeartbeat.load()) {
          postControl(*peer, wire::Kind::kPing, 0, {});
        }
      }
    }
    TORCH_CHECK(
        !isClosed_.load(), "RPC was shut down on worker '", workerInfo_.name_, "' while it waited for the others");
    if (CallTable::Clock::now() >= deadline) {
      std::string missing;
      for (const Peer* peer : barrier_.missing()) {
        missing += (missing.empty() ? "; missing: " : ", ") + peer->describe();
      }
      throw std::runtime_error(
          "worker '" + workerInfo_.name_ + "' waited " + std::to_string(timeout.count()) +
          " ms for all workers to come to the same point" + missing);
    }
  }
  if (result.error) {
    throw std::runtime_error("the workers cannot all come to the same point: " + result.error.message());
  }
  return result.sum;
}

// Ends when nobody waits for an answer any more: two rounds in a row in which no worker had a call open, nor opened one in between.
// (One round is not enough: a worker that has reported may still be asked for something by one that has not.)
void UcxRpcAgent::join(bool /*shutdown*/, float timeoutSeconds) { // the same either way; torch calls shutdown() itself
  checkProcess();
  const std::chrono::milliseconds timeout = toMilliseconds(timeoutSeconds);
  if (isDynamic()) {
    leave(timeout.count() != 0 ? timeout : getRpcTimeout());
    return;
  }
  const auto deadline = deadlineOf(timeout);
  uint64_t openedBefore = ~0ull;
  for (int quietRounds = 0; quietRounds < 2;) {
    const auto left = deadline == kForEver
        ? std::chrono::milliseconds(0)
        : std::max(
              std::chrono::milliseconds(1),
              std::chrono::duration_cast<std::chrono::milliseconds>(deadline - CallTable::Clock::now()));
    while (calls_.size() != 0 && CallTable::Clock::now() < deadline) {
      whileWaiting_();
      std::this_thread::sleep_for(kPoll);
    }
    const uint64_t opened = calls_.opened();
    const bool isQuiet = calls_.size() == 0 && (quietRounds == 0 || opened == openedBefore);
    openedBefore = opened;
    quietRounds = barrier(isQuiet ? 0 : 1, left) == 0 ? quietRounds + 1 : 0;
  }
  isEverybodyLeaving_.store(true);
}

// ------------------------------------------------------------------------------------- groups without a size

void UcxRpcAgent::setMembership(Membership membership, const std::string& joinKey) {
  membership_ = std::move(membership);
  progress_->run([&] { inbox_->acceptJoins(joinKey); });
}

void UcxRpcAgent::announce(Peer& to, wire::Kind kind, const std::string& body) {
  if (to.isThere()) {
    to.hasAcknowledged.store(false);
    postControl(to, kind, 0, Bytes(std::as_bytes(std::span(body))));
  }
}

void UcxRpcAgent::announceJoin(const std::string& record, const std::vector<uint64_t>& members) {
  for (const uint64_t session : members) {
    Peer* peer = directory_.findSession(session);
    if (peer != nullptr && peer->state() == Peer::State::kFailed) {
      addMembers({peer->member()});
      peer = directory_.findSession(session);
    }
    if (peer != nullptr) {
      announce(*peer, wire::Kind::kJoin, record);
    }
  }
}

std::vector<WorkerInfo> UcxRpcAgent::unacknowledged() const {
  std::vector<WorkerInfo> infos;
  for (const Peer* peer : directory_.all()) {
    if (peer->isThere() && !peer->hasAcknowledged.load()) {
      infos.push_back(peer->info());
    }
  }
  return infos;
}

void UcxRpcAgent::onJoin(Deliveries::Join join) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    return; // being destroyed
  }
  threads_->addRequest([self, join = std::move(join)] {
    const auto* text = reinterpret_cast<const char*>(join.record.data());
    try {
      self->membership_.onJoin({text, join.record.size()});
    } catch (const std::exception& error) {
      LOG(WARNING) << "torch_ucx_rpc: worker '" << self->workerInfo_.name_
                   << "' does not admit a process that wants to join the group: " << error.what();
      return;
    }
    if (Peer* peer = self->directory_.findSession(join.session); peer != nullptr) {
      self->postControl(*peer, wire::Kind::kAcknowledge, 0, {});
    }
  });
}

void UcxRpcAgent::onLost(const Peer& peer) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    return; // being destroyed
  }
  threads_->addRequest([self, &peer] {
    try {
      self->membership_.onLost(peer.member().session);
    } catch (const std::exception& error) {
      LOG(WARNING) << "torch_ucx_rpc: the list of members still has " << peer.describe() << ": " << error.what();
    }
  });
}

void UcxRpcAgent::onLeave(Peer& from) {
  from.moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, from.describe() + " is leaving the group"});
  postControl(from, wire::Kind::kAcknowledge, 0, {});
}

// The others are told first: then they call no more, and what has been called is answered.
void UcxRpcAgent::leave(std::chrono::milliseconds timeout) {
  const auto deadline = deadlineOf(timeout);
  for (Peer* peer : directory_.all()) {
    if (peer->member().session != session_) {
      announce(*peer, wire::Kind::kLeave, {});
    }
  }
  // Those who are gone wait for nothing. torch may never answer them: a backward pass whose context was closed when the worker died that
  // had opened it, for one.
  const auto requestsOpen = [this] {
    int64_t sum = 0;
    for (const Peer* peer : directory_.all()) {
      sum += peer->isThere() ? peer->requestsOpen.load() : 0;
    }
    return sum;
  };
  const auto isQuiet = [&] {
    if (calls_.size() != 0 || requestsOpen() != 0) {
      return false;
    }
    bool isSent = false; // asked last: the answer to a request is posted before it counts as served
    progress_->run([&] { isSent = outbox_->underWay() == 0; });
    return isSent;
  };
  while (true) {
    whileWaiting_();
    const std::vector<WorkerInfo> silent = unacknowledged();
    if (silent.empty() && isQuiet()) {
      return;
    }
    if (CallTable::Clock::now() >= deadline) {
      std::string names;
      for (const WorkerInfo& info : silent) {
        names += (names.empty() ? "; not acknowledged by " : ", ") + info.name_;
      }
      throw std::runtime_error(
          "worker '" + workerInfo_.name_ + "' has tried to leave the group for " + std::to_string(timeout.count()) +
          " ms: " + std::to_string(calls_.size()) + " of its calls are open, and it has " +
          std::to_string(requestsOpen()) + " of others to answer" + names);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

} // namespace torch_ucx_rpc
