#pragma once

#include "messaging/message.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/timer.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_ucx_rpc {

// Destroys messages that the transport is done with. It runs no user code while the sending thread may hold torch's
// locks, because another thread that has the GIL may wait for these locks. Thread-safe.
class SentMessages {
 public:
  // A sender's messages wait at most this long for a thread that runs anyway, and at most this many of them wait. Most
  // answers come earlier, and the thread that completes one destroys the messages. With a shorter patience the timer's
  // thread would wake during a loop of small calls, and compete with caller and callee for a core.
  static constexpr auto kPatience = std::chrono::milliseconds(2);
  static constexpr size_t kMaxWaiting = 32;

  // Adds a task to the timer, so the timer must not have started.
  SentMessages(Executor& executor, const Lifetime& lifetime, Timer& timer);

  // The next two take a message whose destruction may run user code, and leave any other message to the caller.

  // On a thread that drives progress: an agent thread destroys the message.
  void destroy(std::unique_ptr<OutgoingMessage>& message);
  // On a sending thread: a thread that waits for an answer, or completes one, destroys the message. An agent thread,
  // woken for every message, would compete with the caller and the callee for a core.
  void destroyLater(std::unique_ptr<OutgoingMessage>& message);

  // Destroys the messages that wait. The calling thread must not hold torch's locks.
  void destroyWaiting();

 private:
  // Returns how many messages wait now, or 0 if this message need not wait.
  size_t take(std::unique_ptr<OutgoingMessage>& message);
  void destroyOnAgentThread();

  Executor& executor_;
  const Lifetime& lifetime_;
  Timer::Task& overdueTask_;

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::unique_ptr<OutgoingMessage>> waiting_;
  bool isDestroying_ = false; // a completion that destroys them is queued or running
  std::atomic<size_t> waitingCount_{0}; // written with mutex_ held
};

} // namespace torch_ucx_rpc
