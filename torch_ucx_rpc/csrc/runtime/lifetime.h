#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

namespace torch_ucx_rpc {

// Whether the agent that an object belongs to is open, and a hold on it for work that may outlast its shutdown. The agent owns all
// its parts directly; a task that runs on another thread holds the agent, and with it every part. Thread-safe.
class Lifetime {
 public:
  // `hold` returns the agent, or null when it is being destroyed.
  explicit Lifetime(std::function<std::shared_ptr<void>()> hold) : hold_(std::move(hold)) {}

  // Keeps the agent alive for as long as the result lives. Null: the agent is being destroyed, so nothing may be queued for it.
  std::shared_ptr<void> hold() const {
    return hold_();
  }

  // True once shutdown has begun: the transport may be closed.
  bool isClosed() const {
    return isClosed_.load();
  }
  void close() {
    isClosed_.store(true);
  }

 private:
  const std::function<std::shared_ptr<void>()> hold_;
  std::atomic<bool> isClosed_{false};
};

} // namespace torch_ucx_rpc
