#include "messaging/receive_window.h"

namespace torch_ucx_rpc {

namespace {

// What is larger than the limit fits alone.
bool fits(uint64_t used, uint64_t bytes, uint64_t limit) {
  return used == 0 || (used < limit && bytes <= limit - used);
}

} // namespace

thread_local Admission* HandlingScope::innermost = nullptr;

void Admission::beginHandling() {
  if (window_ != nullptr && std::exchange(isAhead_, false)) {
    window_->releaseAhead(bytes_);
  }
}

void Admission::release() {
  if (const std::shared_ptr<ReceiveWindow> window = std::exchange(window_, nullptr)) {
    window->release(isResponse_, isAhead_, bytes_);
  }
}

bool ReceiveWindow::tryAdmit(bool isResponse, uint64_t bytes, Admission& admission) {
  // Only admissions raise the sums, and they are made under the worker lock: between load and add they can only fall.
  if (!fits(used_[isResponse ? 1 : 0].load(), bytes, limitBytes_) ||
      (!isResponse && !fits(ahead_.load(), aheadBytesOf(bytes), kAheadBytes))) {
    return false;
  }
  admit(isResponse, bytes, admission);
  return true;
}

void ReceiveWindow::admit(bool isResponse, uint64_t bytes, Admission& admission) {
  used_[isResponse ? 1 : 0].fetch_add(bytes);
  ahead_.fetch_add(isResponse ? 0 : aheadBytesOf(bytes));
  admission.release();
  admission.window_ = shared_from_this();
  admission.isResponse_ = isResponse;
  admission.isAhead_ = !isResponse;
  admission.bytes_ = bytes;
}

void ReceiveWindow::release(bool isResponse, bool isAhead, uint64_t bytes) {
  used_[isResponse ? 1 : 0].fetch_sub(bytes);
  ahead_.fetch_sub(isAhead ? aheadBytesOf(bytes) : 0);
  onReleased();
}

void ReceiveWindow::releaseAhead(uint64_t bytes) {
  ahead_.fetch_sub(aheadBytesOf(bytes));
  onReleased();
}

void ReceiveWindow::onReleased() {
  releases_.fetch_add(1);
  if (waitingMessages.load() != 0) {
    onRoom_();
  }
}

} // namespace torch_ucx_rpc
