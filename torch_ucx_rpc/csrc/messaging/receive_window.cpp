#include "messaging/receive_window.h"

namespace torch_ucx_rpc {

namespace {

// A message larger than the limit fits if it is alone.
bool fits(uint64_t used, uint64_t bytes, uint64_t limit) {
  return used == 0 || bytes == 0 || (used < limit && bytes <= limit - used);
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
    window->release(*this);
  }
}

bool ReceiveWindow::tryAdmit(bool isResponse, uint64_t bytes, Admission& admission, uint64_t deviceBytes) {
  const size_t budget = isResponse ? 1 : 0;
  // Only admissions raise the sums, and the worker lock is held for all of them. So between load and add the sums can
  // only fall.
  if (!fits(used_[budget].load(), bytes, limitBytes_) ||
      !fits(deviceUsed_[budget].load(), deviceBytes, kDeviceLimitBytes) ||
      (!isResponse && !fits(queued_.load(), queuedShareOf(bytes), kMaxQueuedBytes))) {
    return false;
  }
  admit(isResponse, bytes, admission, deviceBytes);
  return true;
}

void ReceiveWindow::admit(bool isResponse, uint64_t bytes, Admission& admission, uint64_t deviceBytes) {
  used_[isResponse ? 1 : 0].fetch_add(bytes);
  deviceUsed_[isResponse ? 1 : 0].fetch_add(deviceBytes);
  queued_.fetch_add(isResponse ? 0 : queuedShareOf(bytes));
  admission.release();
  admission.window_ = shared_from_this();
  admission.isResponse_ = isResponse;
  admission.isQueued_ = !isResponse;
  admission.bytes_ = bytes;
  admission.deviceBytes_ = deviceBytes;
}

bool ReceiveWindow::hasStalled(TimePoint now, bool willMove) {
  if (waitingMessages.load() == 0) {
    stalledSince_ = {};
    return false;
  }
  const uint64_t releases = releases_.load();
  if (stalledSince_ == TimePoint{} || releases != releasesSeen_ || willMove) {
    releasesSeen_ = releases;
    stalledSince_ = now;
    return false;
  }
  if (now - stalledSince_ < (receivingMessages.load() == 0 ? kPatience : kPatienceWhileReceiving)) {
    return false;
  }
  stalledSince_ = now;
  return true;
}

void ReceiveWindow::release(const Admission& admission) {
  used_[admission.isResponse_ ? 1 : 0].fetch_sub(admission.bytes_);
  deviceUsed_[admission.isResponse_ ? 1 : 0].fetch_sub(admission.deviceBytes_);
  queued_.fetch_sub(admission.isQueued_ ? queuedShareOf(admission.bytes_) : 0);
  onReleased();
}

void ReceiveWindow::releaseQueued(uint64_t bytes) {
  queued_.fetch_sub(queuedShareOf(bytes));
  onReleased();
}

void ReceiveWindow::onReleased() {
  // This thread gives room back first, and then reads the count. Inbox stores the count first, and then looks for room.
  // So at least one of the two sees the other.
  releases_.fetch_add(1);
  if (waitingMessages.load() != 0) {
    onRoom_();
  }
}

} // namespace torch_ucx_rpc
