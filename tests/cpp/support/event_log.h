#pragma once

// An EventBuffer whose events go to handlers that write them down.

#include "handlers.h"
#include "messaging/event_buffer.h"

#include <string>
#include <vector>

namespace torch_ucx_rpc {

class EventLog {
 public:
  // Hands out all events so far, as a thread that only submitted an operation does. Returns what the handlers noted.
  std::vector<std::string> take(const std::optional<Driver>& driver = {}) {
    if (const std::unique_ptr<EventBatch> batch = buffer.take()) {
      batch->dispatch(driver);
    }
    return handlers.takeNotes();
  }

  Handlers handlers;
  // While this is set, work goes to the executor, which never runs it.
  std::shared_ptr<void> life;

 private:
  Timer timer_;
  const std::shared_ptr<Executor> executor_ = std::make_shared<Executor>(1, 1, ThreadHooks{}, timer_); // never started
  Lifetime lifetime_{[this] { return life; }};
  SentMessages sentMessages_{*executor_, lifetime_, timer_};

 public:
  EventBuffer buffer{handlers.all, sentMessages_, *executor_, lifetime_};
};

} // namespace torch_ucx_rpc
