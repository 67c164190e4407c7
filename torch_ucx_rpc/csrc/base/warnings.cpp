#include "base/warnings.h"

#include <c10/util/Logging.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Warnings beyond this many are only counted: a receiver that hangs must not cost memory.
constexpr size_t kMostWaiting = 1000;

void toLog(const std::string& sentence) {
  LOG(WARNING) << "torch_ucx_rpc: " << sentence;
}

class Warnings {
 public:
  void add(std::string sentence) {
    const std::unique_lock lock(mutex_);
    if (!receiver_) {
      toLog(sentence);
      return;
    }
    if (waiting_.size() == kMostWaiting) {
      ++dropped_;
      return;
    }
    waiting_.push_back(std::move(sentence));
    if (isDelivering()) {
      return;
    }
    deliverer_ = getpid();
    try {
      std::thread([this] { deliver(); }).detach();
    } catch (const std::system_error&) { // the system allows no more threads
      deliverer_ = 0;
      toLog(waiting_.back());
      waiting_.pop_back();
    }
  }

  void setReceiver(WarningReceiver receiver) {
    flush(); // earlier warnings go to the previous receiver
    const std::lock_guard lock(mutex_);
    receiver_ = std::move(receiver);
  }

  void flush() {
    std::unique_lock lock(mutex_);
    delivered_.wait(lock, [this] { return !isDelivering(); });
  }

 private:
  // A forked process does not have the thread.
  bool isDelivering() const {
    return deliverer_ == getpid();
  }

  void deliver() {
    std::unique_lock lock(mutex_);
    while (!waiting_.empty()) {
      std::string sentence = std::move(waiting_.front());
      waiting_.pop_front();
      if (waiting_.empty() && dropped_ != 0) {
        sentence += " (" + std::to_string(std::exchange(dropped_, 0)) + " warnings after this one are lost)";
      }
      const WarningReceiver receiver = receiver_;
      lock.unlock(); // the receiver may wait for the GIL, whose holder may be about to warn
      receiver ? receiver(sentence) : toLog(sentence);
      lock.lock();
    }
    deliverer_ = 0;
    delivered_.notify_all();
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  WarningReceiver receiver_;
  std::deque<std::string> waiting_;
  size_t dropped_ = 0;
  pid_t deliverer_ = 0; // the process whose thread delivers now, or 0
  std::condition_variable delivered_;
};

Warnings& warnings() {
  static auto* all = new Warnings; // threads may outlive static objects
  return *all;
}

} // namespace

void warn(std::string sentence) {
  warnings().add(std::move(sentence));
}

void setWarningReceiver(WarningReceiver receiver) {
  warnings().setReceiver(std::move(receiver));
}

void flushWarnings() {
  warnings().flush();
}

} // namespace torch_ucx_rpc
