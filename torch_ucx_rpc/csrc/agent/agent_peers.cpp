// Peers that fall silent or die, and what becomes of what they held.

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/torch_state.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using torch::distributed::autograd::DistAutogradContainer;

namespace {

// Of progress, to take in what has come; each takes several messages.
constexpr int kMostSteps = 1000;

// How often something is looked for that the gone have left.
constexpr auto kLeftoversPeriod = std::chrono::seconds(1);

} // namespace

void UcxRpcAgent::checkHeartbeats() {
  if (isClosed_.load()) {
    return; // the transport may be too
  }
  takeInWithWorkerLock(); // that is no silence, though nobody may have had the time to look
  const Heartbeat::Findings findings = heartbeat_.check(Heartbeat::Clock::now());
  for (Peer* peer : findings.quiet) {
    sendNowWithWorkerLock(*peer, wire::Kind::kPing);
  }
  for (Peer* peer : findings.lost) {
    progress_->deliveries().failures.push_back({peer, heartbeat_.describe(*peer)});
  }
}

void UcxRpcAgent::takeInWithWorkerLock() {
  for (int steps = 0; !isClosed_.load() && steps < kMostSteps && transport_->progress() != 0; ++steps) {
  }
}

void UcxRpcAgent::answerPingsWithWorkerLock() {
  // Here, by whoever drives: an answer that went the way of other messages could wait for Python.
  for (Peer* peer : inbox_->takePings()) {
    sendNowWithWorkerLock(*peer, wire::Kind::kPong);
  }
}

void UcxRpcAgent::sendNowWithWorkerLock(Peer& to, wire::Kind kind, uint64_t callId) {
  auto message = std::make_unique<OutgoingMessage>();
  message->to = &to;
  message->address(kind, session_, workerInfo_.id_, to.member().session, callId);
  outbox_->send(std::move(message));
}

void UcxRpcAgent::onPeerGone(Peer& peer, Peer::State state, Error why) {
  if (isClosed_.load() || isEverybodyLeaving_.load()) {
    return;
  }
  if (!peer.moveTo(state, std::move(why))) {
    return;
  }
  for (CallTable::Call& call : calls_.takeAllTo(peer)) {
    endCallToGone(std::move(call));
  }
  progress_->submit([this, &peer] {
    inbox_->dropPeer(peer);
    outbox_->abandon(peer);
  });
  requestRepair();
  releaseHeldBy({&peer});
  hasGone_.store(true);
  timer_.dueBy(Timer::Clock::now() + kLeftoversPeriod);
  barrier_.onMembershipChange();
  processes_.forget(peer.member());
  if (state == Peer::State::kFailed && isDynamic()) {
    onLost(peer);
  }
}

void UcxRpcAgent::requestRepair() {
  isRepairWanted_.store(true);
  timer_.dueBy(Timer::Clock::now());
}

void UcxRpcAgent::repairWithWorkerLock() {
  if (isClosed_.load()) {
    return; // the transport may be too
  }
  if (!isRepairing_.load()) {
    isRepairWanted_.store(false);
  }
  isRepairing_.store(!transport_->repair());
}

Timer::Clock::time_point UcxRpcAgent::releaseLeftovers(Timer::Clock::time_point now) {
  if (hasGone_.load() && now >= leftoversDue_) {
    leftoversDue_ = now + kLeftoversPeriod;
    hasGone_.store(isDynamic()); // its rank may be taken meanwhile
    std::vector<const Peer*> gone;
    for (const Peer* peer : directory_.all()) {
      if (!peer->isThere()) {
        hasGone_.store(true);
        gone.push_back(peer);
      }
    }
    releaseHeldBy(gone);
  }
  return hasGone_.load() ? leftoversDue_ : Timer::Clock::time_point::max();
}

void UcxRpcAgent::releaseHeldBy(const std::vector<const Peer*>& gone) {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (!isTorchsAgent() || self == nullptr) {
    return;
  }
  // Looked up now: a worker that takes a rank may hold others soon.
  std::vector<HeldFork> forks;
  std::vector<int64_t> contexts;
  for (const Peer* peer : gone) {
    const worker_id_t rank = peer->info().id_;
    std::ranges::move(rrefHolders_.takeHeldBy(rank), std::back_inserter(forks));
    std::ranges::move(autogradContextsOf(rank), std::back_inserter(contexts));
  }
  // After the forks, and ended before those are deleted: with its last fork, torch forgets an RRef that is waited for.
  std::vector<WaitForValue> waits =
      rrefHolders_.takeVainWaits([this](const rpc::RRefId& id) { return !isValueToCome(id); });
  if (forks.empty() && contexts.empty() && waits.empty()) {
    return;
  }
  threads_->addCompletion([self, forks = std::move(forks), contexts = std::move(contexts), waits = std::move(waits)] {
    for (const WaitForValue& wait : waits) {
      self->endVainWait(wait);
    }
    try {
      for (const HeldFork& held : forks) {
        (*self->cb_)(*rpc::RRefUserDelete(held.rref, held.fork).toMessage(), {}); // as if it had deleted it itself
      }
      for (const int64_t context : contexts) {
        DistAutogradContainer::getInstance().releaseContextIfPresent(context);
      }
    } catch (const std::exception& error) {
      LOG(WARNING) << "torch_ucx_rpc: could not release all that workers held which are gone: " << error.what();
    }
  });
}

bool UcxRpcAgent::isValueToCome(const rpc::RRefId& id) const {
  const Peer* holder = directory_.find(id.createdOn_); // of the creator's rank
  if (holder == nullptr || holder->info().id_ == workerInfo_.id_) {
    return true;
  }
  if (holder->isThere()) {
    return !isDynamic() || holder->canHaveMade(id.localId_);
  }
  // What has come from one that said goodbye is handled all the same.
  return holder->state() == Peer::State::kLeft && holder->requestsOpen.load() != 0;
}

void UcxRpcAgent::endVainWait(const WaitForValue& wait) const {
  const Peer* holder = directory_.find(wait.creator);
  const std::string why = holder != nullptr && !holder->isThere()
      ? holder->whyGone().message()
      : "the worker that was to make it is gone, and another has its rank, " + std::to_string(wait.creator) + ", now";
  runCallbacks([&] { wait.future->setErrorIfNeeded(asException("this RRef will never have a value: " + why)); });
}

} // namespace torch_ucx_rpc
