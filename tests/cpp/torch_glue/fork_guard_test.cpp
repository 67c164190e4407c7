// Processes that are forked from an agent's: they are counted, and leave its objects alone.

#include "torch_glue/fork_guard.h"

#include "fake_rpc_agent.h"
#include "forked_process.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

namespace torch_ucx_rpc {
namespace {

TEST(ForkGuardTest, EachForkIsCounted) {
  const uint64_t before = forkCount();
  EXPECT_TRUE(inForkedProcess([&] { return forkCount() == before + 1; }));
  EXPECT_EQ(forkCount(), before);
}

TEST(ForkGuardTest, ForkedProcessNeverDestroysAnObjectThatIsKept) {
  rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0)); // whose RRefs the child leaves to the parent
  auto object = std::make_shared<int>();
  auto other = std::make_shared<int>();
  keepInForks(object);
  EXPECT_TRUE(inForkedProcess([&] {
    const std::weak_ptr<int> kept = object;
    const std::weak_ptr<int> notKept = other;
    object.reset();
    other.reset();
    return !kept.expired() && notKept.expired();
  }));
  const std::weak_ptr<int> alive = object;
  object.reset();
  EXPECT_TRUE(alive.expired()) << "the parent does";
  rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

} // namespace
} // namespace torch_ucx_rpc
