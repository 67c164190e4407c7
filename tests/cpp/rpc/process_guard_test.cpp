// A worker's agent in a process that is forked from its own: it is refused there.

#include "rpc/process_guard.h"

#include "base/rpc_failure.h"
#include "forked_process.h"
#include "torch_messages.h"

#include <gtest/gtest.h>

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

} // namespace
} // namespace torch_ucx_rpc
