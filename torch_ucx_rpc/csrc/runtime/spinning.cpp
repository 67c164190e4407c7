#include "runtime/spinning.h"

#include <sched.h>

#include <algorithm>

namespace torch_ucx_rpc {

namespace {

// Other threads may run once in this many looks. A look takes 0.1 to 0.5 us, as long as sched_yield().
constexpr unsigned kTurnsBetweenYields = 8;

} // namespace

size_t Spinning::usableCores() {
  cpu_set_t usable;
  return sched_getaffinity(0, sizeof(usable), &usable) == 0 ? static_cast<size_t>(CPU_COUNT(&usable)) : 1;
}

bool Spinning::isOn(Role role) const {
  return waiting_ == Waiting::kPoll ||
      (waiting_ == Waiting::kAuto && hasCoreEach() && waits_[static_cast<int>(role)].isMostlyShort());
}

bool Spinning::Wait::spin(Awaited awaited, Clock::time_point now) {
  if (began_ == Clock::time_point{}) {
    began_ = now;
    last_ = now;
  }
  if (now - last_ > kInterruption) {
    // Another thread, or another virtual machine, had this core and may need it again.
    spinning_.waits_[static_cast<int>(role_)].add(false);
  }
  last_ = now;
  // A driver spins for data on its way in every mode, and for a message only where spinning is on.
  const Clock::duration forDevice = spinning_.waiting_ == Waiting::kSleep ? kDeviceLimitToSleep : kDeviceLimit;
  const Clock::duration limit = awaited == Awaited::kDevice ? forDevice : kTransferLimit;
  if (awaited != Awaited::kMessage && spinning_.hasCoreEach() && now - began_ < limit) {
    if (++turns_ % kTurnsBetweenYields == 0) {
      sched_yield(); // the other side may be on this very core
    }
    return true;
  }
  if (!spinning_.isOn(role_) || (spinning_.waiting_ == Waiting::kAuto && now - began_ >= kLimit)) {
    return false;
  }
  hasSpun_ = true;
  if (++turns_ % kTurnsBetweenYields == 0) {
    sched_yield();
  }
  return true;
}

Spinning::Clock::time_point Spinning::Wait::end(Clock::time_point now) {
  if (began_ != Clock::time_point{}) { // false if the first look found something
    // A leader on guard may have slept for long while others drove. The time in which no driver found anything counts
    // as the wait.
    const Clock::time_point began = std::max(began_, spinning_.lastFound_);
    const auto limit = hasSpun_ ? kLimit : kLimit + kWakeUp;
    spinning_.waits_[static_cast<int>(role_)].add(now - began <= limit);
  }
  spinning_.lastFound_ = now;
  return now;
}

} // namespace torch_ucx_rpc
