#include "agent/torch_state.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::rpc::RpcAgent;
using torch::distributed::rpc::RRefContext;
using torch::distributed::rpc::worker_id_t;

// Private members may be named in an explicit instantiation, whose friend hands them out.
template <auto kMember, typename Tag>
struct Reach {
  friend auto reach(Tag /*tag*/) {
    return kMember;
  }
};
// clang-format off
struct NextRRefId { friend auto reach(NextRRefId); };
struct ContextAgent { friend auto reach(ContextAgent); };
struct ContextMutex { friend auto reach(ContextMutex); };
struct ContextDestroyed { friend auto reach(ContextDestroyed); };
struct AutogradInstance { friend auto reach(AutogradInstance); };
struct AutogradInitialized { friend auto reach(AutogradInitialized); };
struct AutogradRank { friend auto reach(AutogradRank); };
struct NextContextId { friend auto reach(NextContextId); };
struct NextMessageId { friend auto reach(NextMessageId); };
// clang-format on
template struct Reach<&RRefContext::nextLocalId_, NextRRefId>;
template struct Reach<&RRefContext::agent_, ContextAgent>;
template struct Reach<&RRefContext::destroyedMutex_, ContextMutex>;
template struct Reach<&RRefContext::destroyed_, ContextDestroyed>;
template struct Reach<&DistAutogradContainer::getInstanceInternal, AutogradInstance>;
template struct Reach<&DistAutogradContainer::initialized_, AutogradInitialized>;
template struct Reach<&DistAutogradContainer::worker_id_, AutogradRank>;
template struct Reach<&DistAutogradContainer::next_context_id_, NextContextId>;
template struct Reach<&DistAutogradContainer::next_autograd_message_id_, NextMessageId>;

} // namespace

void renewRRefContext(std::shared_ptr<RpcAgent> agent) {
  RRefContext& context = RRefContext::getInstance();
  const std::lock_guard lock(context.*reach(ContextMutex()));
  // It is const, but of an object on the heap, in a library that was compiled long before, and nobody uses it now.
  const_cast<std::shared_ptr<RpcAgent>&>(context.*reach(ContextAgent())) = std::move(agent); // NOLINT
  context.*reach(ContextDestroyed()) = false;
}

void initAutograd(worker_id_t rank, bool areIdsRandom) {
  DistAutogradContainer& autograd = reach(AutogradInstance())();
  bool& isInitialized = autograd.*reach(AutogradInitialized());
  if (isInitialized && autograd.*reach(AutogradRank()) == rank) {
    return;
  }
  const bool isFirst = !std::exchange(isInitialized, false);
  DistAutogradContainer::init(rank);
  if (areIdsRandom) {
    // The ids of autograd have 48 bits for the count: this takes a quarter of them at most.
    std::random_device device;
    const int64_t start = static_cast<int64_t>(device() >> 6) << 20;
    autograd.*reach(NextContextId()) += start;
    autograd.*reach(NextMessageId()) += start;
    if (isFirst) {
      *reach(NextRRefId()) += start;
    }
  }
}

} // namespace torch_ucx_rpc
