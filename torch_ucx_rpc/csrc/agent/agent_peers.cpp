// Peers that fall silent or die, and what becomes of what they held.

#include "agent/agent.h"
#include "agent/torch_state.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <exception>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using torch::distributed::autograd::DistAutogradContainer;

namespace {

// Of progress, to take in what has come; each takes several messages.
constexpr int kMostSteps = 1000;

// How often something is looked for that the gone have left.
constexpr auto kLeftoversPeriod = std::chrono::seconds(1);

void endWait(const WaitForValue& wait, const std::string& why) {
  wait.future->setErrorIfNeeded(
      std::make_exception_ptr(std::runtime_error("this RRef will never have a value: " + why)));
}

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
  releaseHeldBy(peer);
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
    for (const Peer* peer : directory_.all()) {
      if (!peer->isThere()) {
        hasGone_.store(true);
        releaseHeldBy(*peer);
      }
    }
    if (isDynamic()) {
      endWaitsForForerunners();
    }
  }
  return hasGone_.load() ? leftoversDue_ : Timer::Clock::time_point::max();
}

void UcxRpcAgent::releaseHeldBy(const Peer& gone) {
  if (!isTorchsAgent()) {
    return;
  }
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (self == nullptr) {
    return; // being destroyed
  }
  // Looked up now: a worker that takes its rank may hold others soon.
  const worker_id_t rank = gone.info().id_;
  std::vector<HeldFork> forks = rrefHolders_.takeHeldBy(rank);
  std::vector<int64_t> contexts = autogradContextsOf(rank);
  std::vector<WaitForValue> waits;
  // What has come from one that said goodbye is handled all the same.
  if (gone.state() == Peer::State::kFailed || gone.requestsOpen.load() == 0) {
    waits = rrefHolders_.takeVainWaits([rank](const rpc::RRefId& id) { return id.createdOn_ == rank; });
  }
  if (forks.empty() && contexts.empty() && waits.empty()) {
    return;
  }
  threads_->addCompletion(
      [self, &gone, forks = std::move(forks), contexts = std::move(contexts), waits = std::move(waits)] {
        try {
          for (const HeldFork& held : forks) {
            (*self->cb_)(*rpc::RRefUserDelete(held.rref, held.fork).toMessage(), {}); // as if it had deleted it itself
          }
          for (const int64_t context : contexts) {
            DistAutogradContainer::getInstance().releaseContextIfPresent(context);
          }
          for (const WaitForValue& wait : waits) {
            endWait(wait, gone.whyGone().message());
          }
        } catch (const std::exception& error) {
          LOG(WARNING) << "torch_ucx_rpc: could not release all that " << gone.describe() << " held: " << error.what();
        }
      });
}

void UcxRpcAgent::endWaitsForForerunners() {
  const std::shared_ptr<UcxRpcAgent> self = weak_from_this().lock();
  if (!isTorchsAgent() || self == nullptr) {
    return;
  }
  const auto isOfForerunner = [this](const rpc::RRefId& id) {
    const Peer* holder = directory_.find(id.createdOn_);
    return holder != nullptr && holder->isThere() && holder->info().id_ != workerInfo_.id_ &&
        !holder->canHaveMade(id.localId_);
  };
  std::vector<WaitForValue> waits = rrefHolders_.takeVainWaits(isOfForerunner);
  if (waits.empty()) {
    return;
  }
  threads_->addCompletion([self, waits = std::move(waits)] {
    for (const WaitForValue& wait : waits) {
      endWait(
          wait,
          "the worker that was to make it is gone, and another has its rank, " + std::to_string(wait.creator) +
              ", now");
    }
  });
}

} // namespace torch_ucx_rpc
