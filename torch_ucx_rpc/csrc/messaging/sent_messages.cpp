#include "messaging/sent_messages.h"

#include <utility>

namespace torch_ucx_rpc {

void SentMessages::destroy(std::unique_ptr<OutgoingMessage>& message) {
  if (message->lender == nullptr || !message->lender->mayRunUserCode()) {
    return;
  }
  // The task of this thread may be torch's code with torch's locks. They are free after it.
  if (Executor::isInTask()) {
    Executor::runAfterTask([message = std::move(message)] {});
    return;
  }
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    message.reset(); // the agent is being destroyed: no other thread will do it
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(message));
    if (std::exchange(isDestroying_, true)) {
      return;
    }
  }
  // One thread destroys all messages. It may wait for the GIL while a Python function holds it, and other threads must
  // not wait with it.
  executor_.addCompletion([this, hold = std::move(hold)] {
    std::vector<std::unique_ptr<OutgoingMessage>> taken;
    do {
      taken.clear();
      const std::lock_guard lock(mutex_);
      taken.swap(waiting_);
      isDestroying_ = !taken.empty();
    } while (!taken.empty());
  });
}

} // namespace torch_ucx_rpc
