// Processes that are forked from an agent's process may not use the agent, and leave its objects alone.

#include "torch_glue/fork_guard.h"

#include "base/rpc_failure.h"
#include "fake_rpc_agent.h"
#include "forked_process.h"
#include "torch_messages.h"

#include <gtest/gtest.h>

#include <memory>

namespace torch_ucx_rpc {
namespace {

TEST(ProcessGuardTest, OnlyTheAgentsOwnProcessMayUseIt) {
  const ProcessGuard guard("w0");
  EXPECT_NO_THROW(guard.check());
  EXPECT_TRUE(inForkedProcess([&] {
    const auto failed = rpcFailureOf([&] { guard.check(); });
    return failed && failed->kind() == RpcFailure::Kind::kForked && contains(failed->what(), "forked from worker 'w0'");
  }));
  EXPECT_NO_THROW(guard.check()) << "the parent goes on";
}

TEST(ProcessGuardTest, ForkedProcessMayHaveAnAgentOfItsOwn) {
  const ProcessGuard parents("w0");
  EXPECT_TRUE(inForkedProcess([] {
    const ProcessGuard own("w1");
    own.check();
    return inForkedProcess([&] { return rpcFailureOf([&] { own.check(); }).has_value(); });
  }));
}

TEST(ForkGuardTest, ForkedProcessNeverDestroysAnObjectThatIsKept) {
  rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0)); // the child leaves its RRefs to the parent
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
  EXPECT_TRUE(alive.expired()) << "the parent destroys it";
  rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

} // namespace
} // namespace torch_ucx_rpc
