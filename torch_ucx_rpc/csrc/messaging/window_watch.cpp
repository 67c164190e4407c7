#include "messaging/window_watch.h"

namespace torch_ucx_rpc {

WindowWatch::WindowWatch(
    const ReceiveWindow& window,
    Inbox& inbox,
    Progress& progress,
    const Executor& executor,
    Timer& timer,
    const Lifetime& lifetime)
    : window_(window),
      inbox_(inbox),
      progress_(progress),
      executor_(executor),
      lifetime_(lifetime),
      task_(timer.add("receive window", [this](Timer::TimePoint now) { return check(now); })) {}

Timer::TimePoint WindowWatch::check(Timer::TimePoint now) {
  if (window_.waitingMessages.load() == 0) {
    stalledSince_ = {};
    return Timer::kNever;
  }
  progress_.requestStartDeferred(); // a message that has become slow no longer keeps others waiting
  const uint64_t releases = window_.releases();
  const auto patience =
      window_.receivingMessages.load() == 0 ? ReceiveWindow::kPatience : ReceiveWindow::kPatienceWhileReceiving;
  // Requests that wait for a thread will run and give their bytes back, so the window is not stalled.
  if (stalledSince_ == Timer::TimePoint{} || releases != releases_ || executor_.counts().waitingRequests != 0) {
    releases_ = releases;
    stalledSince_ = now;
  } else if (now - stalledSince_ >= patience) {
    progress_.submit([this] {
      if (!lifetime_.isClosed()) {
        inbox_.admitStalled();
      }
    });
    stalledSince_ = now;
  }
  return now + ReceiveWindow::kPatience / 2;
}

} // namespace torch_ucx_rpc
