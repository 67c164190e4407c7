#pragma once

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace torch_ucx_rpc {

// Returns whether `isSo` holds in a process that is forked from this one.
inline bool inForkedProcess(const std::function<bool()>& isSo) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(isSo() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status == 0;
}

} // namespace torch_ucx_rpc
