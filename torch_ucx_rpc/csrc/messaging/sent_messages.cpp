#include "messaging/sent_messages.h"

#include <utility>

namespace torch_ucx_rpc {

SentMessages::SentMessages(Executor& executor, const Lifetime& lifetime, Timer& timer)
    : executor_(executor), lifetime_(lifetime), overdueTask_(timer.add([this](Timer::TimePoint /*now*/) {
        if (waitingCount_.load() != 0) {
          destroyOnAgentThread();
        }
        return Timer::kNever;
      })) {}

void SentMessages::destroy(std::unique_ptr<OutgoingMessage>& message) {
  if (take(message) != 0) {
    destroyOnAgentThread();
  }
}

void SentMessages::destroyLater(std::unique_ptr<OutgoingMessage>& message) {
  const size_t waiting = take(message);
  if (waiting >= kMaxWaiting) {
    destroyOnAgentThread();
  } else if (waiting != 0) {
    overdueTask_.dueIn(kPatience);
  }
}

void SentMessages::destroyWaiting() {
  if (waitingCount_.load() == 0) {
    return;
  }
  std::vector<std::unique_ptr<OutgoingMessage>> taken; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  taken.swap(waiting_);
  waitingCount_.store(0);
}

size_t SentMessages::take(std::unique_ptr<OutgoingMessage>& message) {
  if (message->lender == nullptr || !message->lender->mayRunUserCode()) {
    return 0;
  }
  // The task of this thread may be torch's code with torch's locks. The locks are free after the task, and a task that
  // sends an answer ends soon. Requests of a handler do not wait for the handler's end, since it may be a training
  // loop.
  if (message->header.kind == wire::Kind::kResponse && Executor::isInTask()) {
    Executor::runAfterTask([message = std::move(message)] {});
    return 0;
  }
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(message));
  waitingCount_.store(waiting_.size());
  return waiting_.size();
}

void SentMessages::destroyOnAgentThread() {
  std::shared_ptr<void> hold = lifetime_.hold();
  if (hold == nullptr) {
    destroyWaiting(); // the agent is being destroyed: no other thread will do it
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(isDestroying_, true)) {
      return;
    }
  }
  // One thread destroys all messages. It may wait for the GIL while a Python function holds it, and other threads must
  // not wait with it.
  executor_.addCompletion([this, hold = std::move(hold)] {
    // A thread that adds a message during this finds isDestroying_ set, and leaves the message to this thread.
    for (bool isOver = false; !isOver;) {
      destroyWaiting();
      const std::lock_guard lock(mutex_);
      isOver = waiting_.empty();
      isDestroying_ = !isOver;
    }
  });
}

} // namespace torch_ucx_rpc
