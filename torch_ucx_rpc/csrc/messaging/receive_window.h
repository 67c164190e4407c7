#pragma once

#include "base/unique_function.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

namespace torch_ucx_rpc {

class ReceiveWindow;

// A message's share of the receive window; gives it back when released or destroyed. For one thread at a time, any.
class Admission {
 public:
  Admission() = default;
  Admission(Admission&& other) noexcept = default;
  Admission& operator=(Admission&& other) noexcept {
    release();
    window_ = std::move(other.window_);
    isResponse_ = other.isResponse_;
    isQueued_ = other.isQueued_;
    bytes_ = other.bytes_;
    return *this;
  }
  ~Admission() {
    release();
  }

  // Its message is being handled: it is received ahead no longer.
  void beginHandling();
  void release();

 private:
  friend class ReceiveWindow;
  std::shared_ptr<ReceiveWindow> window_; // null: nothing to give back
  bool isResponse_ = false;
  bool isQueued_ = false;
  uint64_t bytes_ = 0;
};

// While a thread handles a message with this admission.
class HandlingScope {
 public:
  explicit HandlingScope(Admission& admission) : outer_(std::exchange(innermost, &admission)) {}
  ~HandlingScope() {
    innermost = outer_;
  }
  HandlingScope(const HandlingScope&) = delete;
  HandlingScope& operator=(const HandlingScope&) = delete;

  // Gives back the share of the message that this thread handles, if it does.
  static void releaseInnermost() {
    if (innermost != nullptr) {
      innermost->release();
    }
  }

 private:
  static thread_local Admission* innermost;
  Admission* const outer_;
};

// How many bytes of rendezvous messages this worker takes in at a time, so that memory stays bounded and buffers warm.
// Of requests that no thread handles yet it takes in less, whatever the limit: more of them gain nothing and only make
// memory cold.
//
// Free of deadlock: requests and responses have a budget each, so a handler that waits for a large response gets it
// whatever requests wait; a message larger than the budget is admitted alone; a request gives its bytes back when its
// handler returns or calls out itself, not when its tensors die; and what waits longest is admitted after kPatience
// without any movement, should handlers be waiting for one another (Inbox::admitStalled).
class ReceiveWindow : public std::enable_shared_from_this<ReceiveWindow> {
 public:
  // A window that has not moved for this long, while no request waits for a thread, is stalled.
  static constexpr auto kPatience = std::chrono::milliseconds(100);
  // The same while something is being received: a slow network is no deadlock, and a sender that hangs is none of the
  // others'.
  static constexpr auto kPatienceWhileReceiving = std::chrono::milliseconds(1000);
  // Of requests that are being received or wait for a thread.
  static constexpr uint64_t kMaxQueuedBytes = 16ull * 1024 * 1024;
  // What a request counts of those at most: beside a large one, however slow it comes, there is room for small ones.
  static constexpr uint64_t kMaxQueuedShare = kMaxQueuedBytes / 4 * 3;

  // `onRoom` is called, on the releasing thread, when bytes are given back while something waits.
  ReceiveWindow(uint64_t limitBytes, UniqueFunction<void()> onRoom)
      : limitBytes_(limitBytes), onRoom_(std::move(onRoom)) {}

  // True and an admission if the message fits now. Called under the worker lock.
  bool tryAdmit(bool isResponse, uint64_t bytes, Admission& admission);
  // Whether it fits or not.
  void admit(bool isResponse, uint64_t bytes, Admission& admission);

  // Messages that wait for admission; kept by the inbox under the worker lock.
  std::atomic<uint64_t> waitingMessages{0};
  // Admitted messages that have not arrived whole; likewise.
  std::atomic<uint64_t> receivingMessages{0};

  uint64_t limitBytes() const {
    return limitBytes_;
  }
  uint64_t inUseBytes() const {
    return used_[0].load() + used_[1].load();
  }
  // Counts all that is given back: no change means no movement.
  uint64_t releases() const {
    return releases_.load();
  }

 private:
  friend class Admission;
  static uint64_t queuedShareOf(uint64_t bytes) {
    return std::min(bytes, kMaxQueuedShare);
  }
  void release(bool isResponse, bool isQueued, uint64_t bytes);
  void releaseQueued(uint64_t bytes);
  void onReleased();

  const uint64_t limitBytes_; // of each budget
  UniqueFunction<void()> onRoom_;
  std::atomic<uint64_t> used_[2] = {0, 0}; // requests, responses
  std::atomic<uint64_t> queued_ = 0; // of the requests' bytes, those that are not being handled
  std::atomic<uint64_t> releases_{0};
};

} // namespace torch_ucx_rpc
