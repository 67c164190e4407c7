#include "agent/receive_window.h"

namespace torch_ucx_rpc {

void Admission::release() {
  if (const std::shared_ptr<ReceiveWindow> window = std::exchange(window_, nullptr)) {
    window->release(isResponse_, bytes_);
  }
}

bool ReceiveWindow::tryAdmit(bool isResponse, uint64_t bytes, Admission& admission) {
  const uint64_t used = used_[isResponse ? 1 : 0].load();
  // Only admissions raise the sum, and they are made under the worker lock: between load and add it can only fall.
  if (used != 0 && (used >= limitBytes_ || bytes > limitBytes_ - used)) {
    return false;
  }
  admit(isResponse, bytes, admission);
  return true;
}

void ReceiveWindow::admit(bool isResponse, uint64_t bytes, Admission& admission) {
  used_[isResponse ? 1 : 0].fetch_add(bytes);
  admission.release();
  admission.window_ = shared_from_this();
  admission.isResponse_ = isResponse;
  admission.bytes_ = bytes;
}

void ReceiveWindow::release(bool isResponse, uint64_t bytes) {
  used_[isResponse ? 1 : 0].fetch_sub(bytes);
  releases_.fetch_add(1);
  if (waitingMessages.load() != 0) {
    onRoom_();
  }
}

} // namespace torch_ucx_rpc
