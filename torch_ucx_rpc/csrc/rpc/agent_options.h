#pragma once

#include "runtime/spinning.h"

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// The user's choices. torch_ucx_rpc/_options.py documents and checks each of them.
struct AgentOptions {
  std::chrono::milliseconds rpcTimeout{60'000};
  size_t numWorkerThreads = 16;
  size_t maxWorkerThreads = 512;
  uint64_t receiveWindowBytes = 64ull * 1024 * 1024;
  uint64_t hostPoolBytes = 256ull * 1024 * 1024; // idle memory of the process-wide HostPool
  Waiting waiting = Waiting::kAuto;
  std::chrono::milliseconds heartbeatLimit{10'000};
  std::chrono::milliseconds reconnectLimit{0};
  int streamPriority = 0; // of the streams on which handlers run and arrived tensors are copied
};

} // namespace torch_ucx_rpc
