#include "torch_glue/torch_state.h"

#include "torch_glue/completion.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <utility>

namespace torch_ucx_rpc {

namespace {

namespace rpc = torch::distributed::rpc;
using DeviceList = std::vector<c10::Device>;
using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::rpc::JitFuture;
using torch::distributed::rpc::OwnerRRef;
using torch::distributed::rpc::RpcAgent;
using torch::distributed::rpc::RRef;
using torch::distributed::rpc::RRefContext;
using torch::distributed::rpc::RRefId;
using torch::distributed::rpc::worker_id_t;

// C++ lets an explicit instantiation name private members. Its friend function returns them.
template <auto kMember, typename Tag>
struct Reach {
  friend auto reach(Tag /*tag*/) {
    return kMember;
  }
};
// NOLINTNEXTLINE(cppcoreguidelines-macro-usage): it declares a type
#define TORCH_UCX_RPC_REACH(Tag, member) \
  struct Tag {                           \
    friend auto reach(Tag);              \
  };                                     \
  template struct Reach<&member, Tag>
TORCH_UCX_RPC_REACH(NextRRefId, RRefContext::nextLocalId_);
TORCH_UCX_RPC_REACH(ContextAgent, RRefContext::agent_);
TORCH_UCX_RPC_REACH(ContextMutex, RRefContext::destroyedMutex_);
TORCH_UCX_RPC_REACH(ContextDestroyed, RRefContext::destroyed_);
TORCH_UCX_RPC_REACH(AutogradInstance, DistAutogradContainer::getInstanceInternal);
TORCH_UCX_RPC_REACH(AutogradInitialized, DistAutogradContainer::initialized_);
TORCH_UCX_RPC_REACH(AutogradRank, DistAutogradContainer::worker_id_);
TORCH_UCX_RPC_REACH(NextContextId, DistAutogradContainer::next_context_id_);
TORCH_UCX_RPC_REACH(NextMessageId, DistAutogradContainer::next_autograd_message_id_);
TORCH_UCX_RPC_REACH(ContextForks, RRefContext::forks_);
TORCH_UCX_RPC_REACH(ContextOwners, RRefContext::owners_);
TORCH_UCX_RPC_REACH(ContextPendingOwners, RRefContext::pendingOwners_);
TORCH_UCX_RPC_REACH(ContextPendingUsers, RRefContext::pendingUsers_);
TORCH_UCX_RPC_REACH(ContextPendingChildren, RRefContext::pendingChildren_);
TORCH_UCX_RPC_REACH(ContextConfirmedUsers, RRefContext::confirmedUsers_);
TORCH_UCX_RPC_REACH(HasTimedOut, RRef::timedOut_);
TORCH_UCX_RPC_REACH(ContextMapsMutex, RRefContext::mutex_);
TORCH_UCX_RPC_REACH(AutogradContexts, DistAutogradContainer::autograd_contexts_);

constexpr int kContextNumberBits = 48;

} // namespace

bool isTorchsAgent(const RpcAgent& agent) {
  return RpcAgent::isCurrentRpcAgentSet() && RpcAgent::getCurrentRpcAgent().get() == &agent;
}

void renewRRefContext(std::shared_ptr<RpcAgent> agent) {
  RRefContext& context = RRefContext::getInstance();
  const std::lock_guard lock(context.*reach(ContextMutex()));
  // The member is const. Writing it works in practice: torch is compiled already, and no code uses the member now.
  const_cast<std::shared_ptr<RpcAgent>&>(context.*reach(ContextAgent())) = std::move(agent); // NOLINT
  context.*reach(ContextDestroyed()) = false;
}

int64_t beginRRefIds(bool areRandom) {
  static std::once_flag isRandom;
  std::atomic<int64_t>& next = *reach(NextRRefId());
  if (areRandom) {
    std::call_once(isRandom, [&next] {
      std::random_device device;
      next += static_cast<int64_t>(device()) << 30;
    });
  }
  return next;
}

int64_t beginContextIds(worker_id_t rank, bool areRandom) {
  DistAutogradContainer& autograd = reach(AutogradInstance())();
  bool& isInitialized = autograd.*reach(AutogradInitialized());
  if (!isInitialized || autograd.*reach(AutogradRank()) != rank) {
    isInitialized = false; // otherwise init() refuses another rank
    DistAutogradContainer::init(rank);
    if (areRandom) {
      // The ids of autograd have 48 bits for the count: this takes a quarter of them at most.
      std::random_device device;
      const int64_t start = static_cast<int64_t>(device() >> 6) << 20;
      autograd.*reach(NextContextId()) += start;
      autograd.*reach(NextMessageId()) += start;
    }
  }
  return contextNumber(autograd.*reach(NextContextId()));
}

worker_id_t contextRank(int64_t id) {
  return static_cast<worker_id_t>(id >> kContextNumberBits);
}

int64_t contextNumber(int64_t id) {
  return id & ((int64_t{1} << kContextNumberBits) - 1);
}

void stopRRefDeletions() {
  // Without the lock: a forked child has only this thread, and a thread of the parent may have held the lock.
  RRefContext::getInstance().*reach(ContextDestroyed()) = true;
}

std::vector<HeldFork> heldForks() {
  RRefContext& context = RRefContext::getInstance();
  std::vector<HeldFork> held;
  const std::lock_guard lock(context.*reach(ContextMapsMutex()));
  for (const auto& [rref, forks] : context.*reach(ContextForks())) {
    for (const auto& fork : forks) {
      held.push_back({rref, fork});
    }
  }
  return held;
}

c10::intrusive_ptr<JitFuture> valueAwaitedWith(const HeldFork& only) {
  RRefContext& context = RRefContext::getInstance();
  const std::lock_guard lock(context.*reach(ContextMapsMutex()));
  const auto& known = context.*reach(ContextForks());
  const auto& owners = context.*reach(ContextOwners());
  const auto forks = known.find(only.rref);
  const auto rref = owners.find(only.rref);
  if (forks == known.end() || rref == owners.end() || forks->second.size() != 1 || !forks->second.contains(only.fork)) {
    return nullptr;
  }
  const auto owner = c10::static_intrusive_pointer_cast<OwnerRRef>(rref->second);
  return owner->getFuture()->completed() ? nullptr : owner->getFuture();
}

c10::intrusive_ptr<RRef> takeBackFork(const rpc::RRefForkData& fork) {
  RRefContext& context = RRefContext::getInstance();
  if (fork.parent_ == fork.ownerId_) { // this worker
    return context.delForkOfOwner(fork.rrefId_, fork.forkId_);
  }
  context.delPendingChild(fork.forkId_);
  return nullptr;
}

void endWaitsForReferences() {
  RRefContext& context = RRefContext::getInstance();
  std::vector<rpc::ForkId> passedOn;
  std::vector<rpc::ForkId> notMade;
  std::unique_lock lock(context.*reach(ContextMapsMutex()));
  for (const auto& [fork, rref] : context.*reach(ContextPendingChildren())) {
    passedOn.push_back(fork);
  }
  for (const auto& [fork, user] : context.*reach(ContextPendingUsers())) {
    // A reference without this future came from another worker, and torch waits for the answer to a report of it.
    const c10::intrusive_ptr<JitFuture> creation = user->rref_->getOwnerCreationFuture();
    if (creation != nullptr && creation->completed() && creation->hasError()) {
      notMade.push_back(fork);
    }
  }
  lock.unlock(); // torch's functions take it
  for (const rpc::ForkId& fork : passedOn) {
    context.delPendingChild(fork); // does nothing if the news has come since
  }
  for (const rpc::ForkId& fork : notMade) {
    // Throws if the callback of rpc.remote() has just ended the wait, as it does after a timeout. If this comes first,
    // that callback throws.
    runCallbacks([&] { context.delPendingUser(fork); });
  }
}

std::vector<WaitForValue> takeWaitsForValues(const std::function<bool(const RRefId&)>& isHopeless) {
  RRefContext& context = RRefContext::getInstance();
  std::vector<WaitForValue> waits;
  const std::lock_guard lock(context.*reach(ContextMapsMutex()));
  for (const auto& [id, rref] : context.*reach(ContextOwners())) {
    const auto owner = c10::static_intrusive_pointer_cast<OwnerRRef>(rref);
    if (!owner->hasValue() && isHopeless(id)) {
      waits.push_back({id.createdOn_, owner->getFuture()});
    }
  }
  std::erase_if(context.*reach(ContextPendingOwners()), [&](const auto& entry) {
    if (!isHopeless(entry.first)) {
      return false;
    }
    waits.push_back({entry.first.createdOn_, entry.second});
    return true;
  });
  return waits;
}

void invalidateRRefsOf(worker_id_t owner) {
  RRefContext& context = RRefContext::getInstance();
  std::vector<c10::intrusive_ptr<RRef>> rrefs; // released without the lock, which their destructor takes
  std::unique_lock lock(context.*reach(ContextMapsMutex()));
  for (const auto& [fork, user] : context.*reach(ContextPendingUsers())) {
    rrefs.push_back(user->rref_);
  }
  for (const auto& [fork, user] : context.*reach(ContextConfirmedUsers())) {
    rrefs.push_back(user.lock());
  }
  lock.unlock();
  for (const c10::intrusive_ptr<RRef>& rref : rrefs) {
    if (rref != nullptr && rref->owner() == owner) {
      ((*rref).*reach(HasTimedOut())).store(true);
    }
  }
}

void keepRRefThatTorchMarks() {
  static const auto* const kept = new c10::intrusive_ptr<RRef>([] {
    auto rref = c10::make_intrusive<OwnerRRef>(worker_id_t{0}, RRefId(0, 0), c10::AnyType::get(), DeviceList());
    rref->handleError(rpc::RPCErrorType::TIMEOUT, *c10::make_intrusive<JitFuture>(c10::AnyType::get()));
    return c10::intrusive_ptr<RRef>(std::move(rref));
  }());
  (void)kept;
}

std::optional<CreatedRRef> findCreatedRRef(const JitFuture& creation) {
  if (!RpcAgent::isCurrentRpcAgentSet()) { // without an agent there is no context either, and asking for it throws
    return std::nullopt;
  }
  RRefContext& context = RRefContext::getInstance();
  const auto isIt = [&creation](const RRef& rref) { return rref.getOwnerCreationFuture().get() == &creation; };
  const std::lock_guard lock(context.*reach(ContextMapsMutex()));
  for (const auto& [fork, user] : context.*reach(ContextPendingUsers())) {
    if (isIt(*user->rref_)) {
      return CreatedRRef{user->rref_, fork};
    }
  }
  for (const auto& [id, rref] : context.*reach(ContextOwners())) { // of calls to oneself
    if (isIt(*rref)) {
      return CreatedRRef{rref, id};
    }
  }
  return std::nullopt;
}

std::optional<rpc::ForkId> markTimedOutRRef(const JitFuture& creation) {
  const std::optional<CreatedRRef> created = findCreatedRRef(creation);
  if (!created) {
    return std::nullopt;
  }
  ((*created->rref).*reach(HasTimedOut())).store(true);
  return created->reference;
}

void failIfForgotten(const CreatedRRef& own, const std::exception_ptr& why) {
  RRefContext& context = RRefContext::getInstance();
  std::unique_lock lock(context.*reach(ContextMapsMutex()));
  if ((context.*reach(ContextOwners())).count(own.rref->rrefId()) != 0) {
    return; // another worker has a reference, and torch will have the value
  }
  lock.unlock();
  c10::static_intrusive_pointer_cast<OwnerRRef>(own.rref)->getFuture()->setErrorIfNeeded(why);
}

std::vector<int64_t> orphanedContexts(const std::function<bool(int64_t id)>& isOrphan) {
  DistAutogradContainer& autograd = reach(AutogradInstance())();
  std::vector<int64_t> ids;
  if (!(autograd.*reach(AutogradInitialized()))) {
    return ids;
  }
  for (auto& shard : autograd.*reach(AutogradContexts())) {
    const std::lock_guard lock(shard.lock);
    for (const auto& [id, context] : shard.contexts) {
      if (isOrphan(id)) {
        ids.push_back(id);
      }
    }
  }
  return ids;
}

} // namespace torch_ucx_rpc
