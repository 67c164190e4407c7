#include "messaging/receive_window.h"

namespace torch_ucx_rpc {

namespace {

// A message larger than the limit fits if it is alone.
bool fits(uint64_t used, uint64_t bytes, uint64_t limit) {
  return used == 0 || (used < limit && bytes <= limit - used);
}

} // namespace

thread_local Admission* HandlingScope::innermost = nullptr;

void Admission::beginHandling() {
  if (window_ != nullptr && std::exchange(isQueued_, false)) {
    window_->releaseQueued(bytes_);
  }
}

void Admission::release() {
  if (const std::shared_ptr<ReceiveWindow> window = std::exchange(window_, nullptr)) {
    window->release(isResponse_, isQueued_, bytes_);
  }
}

bool ReceiveWindow::tryAdmit(bool isResponse, uint64_t bytes, Admission& admission) {
  // Only admissions raise the sums, and all of them have the worker lock. So between load and add the sums can only
  // fall.
  if (!fits(used_[isResponse ? 1 : 0].load(), bytes, limitBytes_) ||
      (!isResponse && !fits(queued_.load(), queuedShareOf(bytes), kMaxQueuedBytes))) {
    return false;
  }
  admit(isResponse, bytes, admission);
  return true;
}

void ReceiveWindow::admit(bool isResponse, uint64_t bytes, Admission& admission) {
  used_[isResponse ? 1 : 0].fetch_add(bytes);
  queued_.fetch_add(isResponse ? 0 : queuedShareOf(bytes));
  admission.release();
  admission.window_ = shared_from_this();
  admission.isResponse_ = isResponse;
  admission.isQueued_ = !isResponse;
  admission.bytes_ = bytes;
}

void ReceiveWindow::release(bool isResponse, bool isQueued, uint64_t bytes) {
  used_[isResponse ? 1 : 0].fetch_sub(bytes);
  queued_.fetch_sub(isQueued ? queuedShareOf(bytes) : 0);
  onReleased();
}

void ReceiveWindow::releaseQueued(uint64_t bytes) {
  queued_.fetch_sub(queuedShareOf(bytes));
  onReleased();
}

void ReceiveWindow::onReleased() {
  releases_.fetch_add(1);
  if (waitingMessages.load() != 0) {
    onRoom_();
  }
}

} // namespace torch_ucx_rpc
