#pragma once

#include "cuda_calls.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

// The contexts and streams of the stub's device. The work of a stream takes time.
namespace cuda_stub {

using Clock = std::chrono::steady_clock;

struct Context {};
struct Event {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};
};
struct Stream {
  struct Work {
    Clock::duration takes;
    std::function<void()> execute;
  };
  std::deque<Work> queue;
  Clock::time_point dueAt; // when the first work in the queue is done
};

inline Context primaryContext;
inline std::atomic<int> primaryUsers{0};
inline thread_local std::vector<CUcontext> contexts;

inline CUcontext currentContext() {
  return contexts.empty() ? nullptr : contexts.back();
}

class Device {
 public:
  static Device& instance() {
    static auto* device = new Device();
    return *device;
  }

  void enqueue(CUstream stream, std::function<void()> work, uint64_t takesUs) {
    const std::lock_guard lock(mutex_);
    const std::chrono::microseconds takes(takesUs);
    if (stream->queue.empty()) {
      stream->dueAt = Clock::now() + takes;
    }
    stream->queue.push_back({takes, std::move(work)});
    changed_.notify_all();
  }

  void synchronize(CUstream stream) {
    const auto began = Clock::now();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream->queue.empty(); });
    blocked_ += Clock::now() - began;
  }

  Clock::duration blocked() {
    const std::lock_guard lock(mutex_);
    return blocked_;
  }

  CUstream makeStream() {
    auto* stream = new Stream();
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return stream;
  }

  void destroy(CUstream stream) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream->queue.empty(); });
    std::erase(streams_, stream);
    delete stream;
  }

  void hold(bool isHeld) {
    const std::lock_guard lock(mutex_);
    isHeld_ = isHeld;
    changed_.notify_all();
  }

  const uint64_t copyUs = fromEnvironment("CUDA_STUB_COPY_US");
  const uint64_t eventUs = fromEnvironment("CUDA_STUB_EVENT_US");

 private:
  Device() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto isWaiting = [this](CUstream stream) { return !isHeld_ && !stream->queue.empty(); };
      const auto next = std::min_element(streams_.begin(), streams_.end(), [&](CUstream a, CUstream b) {
        return isWaiting(a) != isWaiting(b) ? isWaiting(a) : a->dueAt < b->dueAt;
      });
      if (next == streams_.end() || !isWaiting(*next)) {
        changed_.wait(lock);
        continue;
      }
      CUstream stream = *next;
      if (stream->dueAt > Clock::now()) {
        changed_.wait_until(lock, stream->dueAt);
        continue;
      }
      const std::function<void()> execute = std::move(stream->queue.front().execute);
      lock.unlock();
      execute();
      lock.lock();
      stream->queue.pop_front();
      if (!stream->queue.empty()) {
        stream->dueAt = Clock::now() + stream->queue.front().takes;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<CUstream> streams_;
  bool isHeld_ = false;
  Clock::duration blocked_{0};
};

inline void* asPointer(CUdeviceptr at) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(at));
}

} // namespace cuda_stub
