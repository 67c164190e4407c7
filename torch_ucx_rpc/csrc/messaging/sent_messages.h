#pragma once

#include "messaging/message.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"

#include <memory>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Destroys messages that the transport is done with. Tensors are never destroyed on the sending thread: torch may hold
// locks there that another thread, which has the GIL, waits for. Thread-safe.
class SentMessages {
 public:
  SentMessages(Executor& executor, const Lifetime& lifetime) : executor_(executor), lifetime_(lifetime) {}

  // Takes the message if destroying it may run user code, and destroys it later; leaves it to the caller otherwise.
  void destroy(std::unique_ptr<OutgoingMessage>& message);

 private:
  Executor& executor_;
  const Lifetime& lifetime_;

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::unique_ptr<OutgoingMessage>> waiting_;
  bool isDestroying_ = false; // a completion for that is under way
};

} // namespace torch_ucx_rpc
