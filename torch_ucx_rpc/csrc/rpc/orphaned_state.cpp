#include "rpc/orphaned_state.h"

#include "base/warnings.h"
#include "torch_glue/completion.h"
#include "torch_glue/torch_state.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using torch::distributed::autograd::DistAutogradContainer;

namespace {

// How often the task looks for state of gone workers.
constexpr auto kReleasePeriod = std::chrono::seconds(1);
// How many passes look for everything after a worker has ended.
constexpr int kPasses = 10;

// Deletes the forks as if their holders had done it.
void deleteForks(const std::vector<HeldFork>& forks, const RequestCallback& callback) {
  for (const HeldFork& held : forks) {
    callback(*rpc::RRefUserDelete(held.rref, held.fork).toMessage(), {});
  }
}

void closeContexts(const std::vector<int64_t>& ids) {
  for (const int64_t id : ids) {
    DistAutogradContainer::getInstance().releaseContextIfPresent(id);
  }
}

} // namespace

OrphanedState::OrphanedState(const AgentParts& parts, const RpcAgent& agent, const RequestCallback& callback)
    : AgentParts(parts),
      agent_(agent),
      callback_(callback),
      releaseTask_(timer_.add([this](Timer::TimePoint now) { return releaseAgain(now); })) {}

void OrphanedState::onPeerGone(Peer& peer) {
  release({peer.member().rank});
  passesLeft_.store(kPasses);
  releaseTask_.dueIn(kReleasePeriod);
}

void OrphanedState::closeContextsOfOthers() const {
  if (isTorchsAgent(agent_)) {
    closeContexts(orphanedContexts([this](int64_t id) { return contextRank(id) != self_.rank; }));
  }
}

void OrphanedState::releaseReferences() const {
  if (isTorchsAgent(agent_)) {
    deleteForks(heldForks(), callback_);
    endWaitsForReferences();
  }
}

Timer::TimePoint OrphanedState::releaseAgain(Timer::TimePoint now) {
  Ranks gone;
  bool isHandling = false;
  for (const Peer* peer : directory_.all()) {
    if (!peer->isThere()) {
      gone.insert(peer->member().rank);
      isHandling = isHandling || peer->requestsOpen.load() != 0;
    }
  }
  // Once the handlers of the dead have ended, they leave nothing more, and further passes would cost more with each
  // dead worker. But threads may still begin to wait for values that the dead were to make, so all passes look for
  // those.
  const bool mayHoldMore = isHandling || passesLeft_.load() > 0;
  passesLeft_.fetch_sub(passesLeft_.load() > 0 ? 1 : 0);
  release(mayHoldMore ? gone : Ranks{});
  // In a dynamic group another worker may have taken the rank, so that `gone` is empty. Threads may still wait for a
  // value of the worker before it.
  return gone.empty() && !isDynamic_ ? Timer::kNever : now + kReleasePeriod;
}

void OrphanedState::release(const Ranks& gone) {
  std::shared_ptr<void> hold = lifetime_.hold();
  if (!isTorchsAgent(agent_) || hold == nullptr) {
    return;
  }
  // Looked up now and not in the task: a worker that takes the rank may soon hold references of its own.
  std::vector<HeldFork> forks;
  if (!gone.empty()) {
    forks = holders_.takeHeldBy(gone);
  }
  std::vector<int64_t> contexts;
  if (!gone.empty() || isDynamic_) {
    contexts = orphanedContexts(
        [&](int64_t id) { return gone.contains(contextRank(id)) || (isDynamic_ && !mayStillBeClosed(id)); });
  }
  // Waits are looked up after the forks and ended before the forks are deleted. With the last fork of an RRef torch
  // forgets the RRef, even if a thread waits for it.
  std::vector<WaitForValue> waits =
      holders_.takeHopelessWaits([this](const RRefId& id) { return !mayStillGetValue(id); });
  if (forks.empty() && contexts.empty() && waits.empty()) {
    return;
  }
  executor_.addCompletion([this,
                           hold = std::move(hold),
                           forks = std::move(forks),
                           contexts = std::move(contexts),
                           waits = std::move(waits)] {
    for (const WaitForValue& wait : waits) {
      endHopelessWait(wait);
    }
    try {
      deleteForks(forks, callback_);
      closeContexts(contexts);
    } catch (const std::exception& error) {
      warn(std::string("could not release all state of dead workers: ") + error.what());
    }
  });
}

bool OrphanedState::mayStillGetValue(const RRefId& id) const {
  const Peer* holder = directory_.find(id.createdOn_); // the worker that has the creator's rank now
  if (holder == nullptr || holder->member().rank == self_.rank) {
    return true;
  }
  if (holder->isThere()) {
    return !isDynamic_ || holder->canHaveMadeRRef(id.localId_);
  }
  // A request that came before its caller's goodbye is still handled.
  return holder->state() == Peer::State::kLeft && holder->requestsOpen.load() != 0;
}

bool OrphanedState::mayStillBeClosed(int64_t context) const {
  const Peer* holder = directory_.find(contextRank(context)); // the worker that has the opener's rank now
  return holder == nullptr || holder->member().rank == self_.rank ||
      holder->canHaveOpenedContext(contextNumber(context));
}

void OrphanedState::endHopelessWait(const WaitForValue& wait) const {
  const Peer* holder = directory_.find(wait.creator);
  const std::string why = holder != nullptr && !holder->isThere()
      ? holder->whyGone().message()
      : "the worker that was to make it is gone, and another has its rank, " + std::to_string(wait.creator) + ", now";
  const std::string what = "this RRef will never have a value: " + why;
  const std::exception_ptr failure = std::make_exception_ptr(
      holder != nullptr && !holder->isThere() ? holder->failure(RpcFailure::Kind::kRRefLost, what, why)
                                              : RpcFailure(RpcFailure::Kind::kRRefLost, what));
  runCallbacks([&] { wait.future->setErrorIfNeeded(failure); });
}

} // namespace torch_ucx_rpc
