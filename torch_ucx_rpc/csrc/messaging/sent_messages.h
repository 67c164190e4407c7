#pragma once

#include "messaging/message.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"

#include <memory>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Destroys messages that the transport is done with. Tensors are never destroyed on the sending thread. torch may hold
// locks there, and another thread that has the GIL may wait for them. Thread-safe.
class SentMessages {
 public:
  SentMessages(Executor& executor, const Lifetime& lifetime) : executor_(executor), lifetime_(lifetime) {}

  // Takes a message whose destruction may run user code, and destroys it later. Leaves any other message to the caller.
  void destroy(std::unique_ptr<OutgoingMessage>& message);

 private:
  Executor& executor_;
  const Lifetime& lifetime_;

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::unique_ptr<OutgoingMessage>> waiting_;
  bool isDestroying_ = false; // a completion that destroys them is queued or running
};

} // namespace torch_ucx_rpc
