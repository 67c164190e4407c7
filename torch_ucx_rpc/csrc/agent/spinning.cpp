#include "agent/spinning.h"

#include <sched.h>

namespace torch_ucx_rpc {

namespace {

// Every how many looks another thread may run: a look takes 0.1 to 0.5 us, as long as the system call.
constexpr unsigned kTurnsBetweenYields = 8;

size_t usableCores() {
  cpu_set_t usable;
  return sched_getaffinity(0, sizeof(usable), &usable) == 0 ? static_cast<size_t>(CPU_COUNT(&usable)) : 1;
}

} // namespace

Spinning::Spinning(Waiting waiting) : waiting_(waiting), cores_(usableCores()) {}

bool Spinning::Wait::spin() {
  if (spinning_.waiting_ == Waiting::kSleep) {
    return false;
  }
  const Clock::time_point now = Clock::now();
  if (began_ == Clock::time_point{}) {
    began_ = now;
    last_ = now;
  }
  if (spinning_.waiting_ == Waiting::kAuto) {
    if (now - last_ > kInterruption) {
      shortness_ = 0; // another thread had this core meanwhile, and may need it again
    }
    last_ = now;
    if (shortness_ <= kAlways / 2 || spinning_.cores_ == 1 || spinning_.processesHere_.load() > spinning_.cores_ ||
        now - began_ >= kLimit) {
      return false;
    }
  }
  hasSpun_ = true;
  if (++turns_ % kTurnsBetweenYields == 0) {
    sched_yield();
  }
  return true;
}

void Spinning::Wait::end() {
  if (began_ == Clock::time_point{}) {
    return; // it did not have to wait
  }
  const auto limit = hasSpun_ ? kLimit : kLimit + kWakeUp;
  if (Clock::now() - began_ <= limit) {
    shortness_ += (kAlways - shortness_) / 8;
  } else {
    shortness_ -= shortness_ / 4;
  }
}

} // namespace torch_ucx_rpc
