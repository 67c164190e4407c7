#pragma once

#include "messaging/inbox.h"
#include "messaging/receive_window.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/progress.h"
#include "runtime/timer.h"

#include <cstdint>

namespace torch_ucx_rpc {

// Notices that the receive window has stalled: messages wait for it, nothing is given back, and no request waits for a
// thread. The handlers that fill it then wait for one another. So it has the inbox admit one message more.
class WindowWatch {
 public:
  // Adds a task to the timer, so it must not have started.
  WindowWatch(
      const ReceiveWindow& window,
      Inbox& inbox,
      Progress& progress,
      const Executor& executor,
      Timer& timer,
      const Lifetime& lifetime);

  // To be called in each round while messages wait for the window. Any thread.
  void begin() {
    task_.dueIn(ReceiveWindow::kPatience);
  }

 private:
  Timer::TimePoint check(Timer::TimePoint now);

  const ReceiveWindow& window_;
  Inbox& inbox_; // worker lock
  Progress& progress_;
  const Executor& executor_;
  const Lifetime& lifetime_;
  Timer::Task& task_;

  // Timer thread only:
  uint64_t releases_ = 0; // of the window, when it moved last
  Timer::TimePoint stalledSince_{}; // when it moved last; {} if no message waits for it
};

} // namespace torch_ucx_rpc
