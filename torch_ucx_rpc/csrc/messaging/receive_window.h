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

// A message's share of the receive window. release() or the destructor gives it back. Any thread may use it, one at a
// time.
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
    deviceBytes_ = other.deviceBytes_;
    return *this;
  }
  ~Admission() {
    release();
  }

  // Call it when a thread begins to handle the message, which then no longer counts as queued.
  void beginHandling();
  void release();

 private:
  friend class ReceiveWindow;
  std::shared_ptr<ReceiveWindow> window_; // null if there is nothing to give back
  bool isResponse_ = false;
  bool isQueued_ = false;
  uint64_t bytes_ = 0;
  uint64_t deviceBytes_ = 0;
};

// Marks the time in which the calling thread handles the message of an admission.
class HandlingScope {
 public:
  explicit HandlingScope(Admission& admission) : outer_(std::exchange(innermost, &admission)) {}
  ~HandlingScope() {
    innermost = outer_;
  }
  HandlingScope(const HandlingScope&) = delete;
  HandlingScope& operator=(const HandlingScope&) = delete;

  // Gives back the share of the message that the calling thread handles, if it handles one.
  static void releaseInnermost() {
    if (innermost != nullptr) {
      innermost->release();
    }
  }

 private:
  static thread_local Admission* innermost;
  Admission* const outer_;
};

// Bounds the bytes of requests and answers that this worker takes in by rendezvous at a time. So memory stays bounded,
// and buffers stay warm. Values of channels have bounds of their own (rpc/channel.h). Queued requests are those that
// are being received or wait for a thread. They have a fixed bound of their own: more of them gain nothing, and only
// make memory cold. Bytes that are received into device memory have a separate bound. They do not count as queued,
// because that memory does not get cold.
//
// The window cannot deadlock:
// - Requests and responses have a budget each. A handler that waits for a large response gets it, however many requests
//   wait.
// - A message larger than the budget is admitted alone.
// - A request gives its bytes back when its handler returns, makes a call or waits for a channel, not when its tensors
//   die.
// - Handlers may still wait for one another. After kPatience without any movement, Inbox::admitStalled() admits the
//   request that has waited longest, whether it fits or not.
class ReceiveWindow : public std::enable_shared_from_this<ReceiveWindow> {
 public:
  // A window that has not moved for this long, while no request waits for a thread, is stalled.
  static constexpr auto kPatience = std::chrono::milliseconds(100);
  // The patience while a message is being received. It is longer, because a slow network is not a deadlock. It is
  // limited, because a sender that hangs must not stop the others for good.
  static constexpr auto kPatienceWhileReceiving = std::chrono::milliseconds(1000);
  // The most bytes of queued requests.
  static constexpr uint64_t kMaxQueuedBytes = 8ull * 1024 * 1024;
  // A request counts as this many queued bytes at most. So a large request leaves room for small ones, however slowly
  // it arrives.
  static constexpr uint64_t kMaxQueuedShare = kMaxQueuedBytes / 4 * 3;
  // The most bytes in device memory, for each budget: sixteen pieces. That is one piece for each of 16 handlers, and is
  // little beside a device's memory.
  static constexpr uint64_t kDeviceLimitBytes = 1024ull * 1024 * 1024;

  // The releasing thread calls `onRoom` if it gives bytes back while a message waits.
  ReceiveWindow(uint64_t limitBytes, UniqueFunction<void()> onRoom)
      : limitBytes_(limitBytes), onRoom_(std::move(onRoom)) {}

  // Admits the message if it fits now, and otherwise returns false. `bytes` counts the bytes for host memory. Needs the
  // worker lock.
  bool tryAdmit(bool isResponse, uint64_t bytes, Admission& admission, uint64_t deviceBytes = 0);
  // Admits the message even if it does not fit. Needs the worker lock.
  void admit(bool isResponse, uint64_t bytes, Admission& admission, uint64_t deviceBytes = 0);

  // The number of messages that wait for admission. The inbox writes it under the worker lock.
  std::atomic<uint64_t> waitingMessages{0};
  // The number of admitted messages that have not arrived whole. The receiver writes it under the worker lock.
  std::atomic<uint64_t> receivingMessages{0};

  uint64_t limitBytes() const {
    return limitBytes_;
  }
  uint64_t inUseBytes() const {
    return used_[0].load() + used_[1].load();
  }
  uint64_t deviceBytesInUse() const {
    return deviceUsed_[0].load() + deviceUsed_[1].load();
  }
  // Whether messages wait, and no bytes have been given back for kPatience, or kPatienceWhileReceiving. After each
  // `true`, the time begins again. `willMove` says that bytes will be given back without more memory. Only one thread
  // may call hasStalled().
  using TimePoint = std::chrono::steady_clock::time_point;
  bool hasStalled(TimePoint now, bool willMove);

 private:
  friend class Admission;
  static uint64_t queuedShareOf(uint64_t bytes) {
    return std::min(bytes, kMaxQueuedShare);
  }
  void release(const Admission& admission);
  void releaseQueued(uint64_t bytes);
  void onReleased();

  const uint64_t limitBytes_; // the limit of each budget
  UniqueFunction<void()> onRoom_;
  std::atomic<uint64_t> used_[2] = {0, 0}; // requests, responses
  std::atomic<uint64_t> deviceUsed_[2] = {0, 0}; // in memory of devices
  std::atomic<uint64_t> queued_ = 0; // bytes of requests that no thread handles yet
  std::atomic<uint64_t> releases_{0}; // how often bytes were given back
  // Used by hasStalled() alone:
  uint64_t releasesSeen_ = 0;
  TimePoint stalledSince_{}; // when the window moved last; {} if no message waits for it
};

} // namespace torch_ucx_rpc
