#include "transport/ucp/ucp_rendezvous.h"

#include <new>
#include <utility>

namespace torch_ucx_rpc {

// While the listener's callback runs, the descriptor is UCX's. If the listener releases the handle there, UCX keeps the
// descriptor; otherwise this list owns it (endAnnouncement).
UcpRendezvous* UcpRendezvousList::announce(void* descriptor) noexcept {
  auto* rendezvous = new (std::nothrow) UcpRendezvous{descriptor};
  if (rendezvous == nullptr) {
    return nullptr;
  }
  all_.push(rendezvous);
  announced_ = rendezvous;
  return rendezvous;
}

bool UcpRendezvousList::withdraw(UcpRendezvous* rendezvous) noexcept {
  if (announced_ != rendezvous) {
    return false;
  }
  announced_ = nullptr;
  rendezvous->descriptor = nullptr; // the listener may have kept the handle
  return true;
}

ucs_status_t UcpRendezvousList::endAnnouncement() noexcept {
  announced_ = nullptr;
  return std::exchange(isAnnouncedReleased_, false) ? UCS_OK : UCS_INPROGRESS; // in progress: it is kept
}

std::unique_ptr<UcpRendezvous> UcpRendezvousList::take(void* handle) noexcept {
  std::unique_ptr<UcpRendezvous> rendezvous(static_cast<UcpRendezvous*>(handle));
  if (rendezvous.get() == announced_) {
    announced_ = nullptr;
  }
  all_.remove(rendezvous.get());
  return rendezvous;
}

void UcpRendezvousList::release(ucp_worker_h worker, void* handle) noexcept {
  const bool isAnnounced = handle == announced_;
  const std::unique_ptr<UcpRendezvous> rendezvous = take(handle);
  if (isAnnounced) {
    isAnnouncedReleased_ = true; // UCX has not given its descriptor away yet, and need not
  } else if (rendezvous->descriptor != nullptr) {
    ucp_am_data_release(worker, rendezvous->descriptor);
  }
}

void UcpRendezvousList::releaseDescriptors(ucp_worker_h worker) noexcept {
  for (UcpRendezvous* rendezvous = all_.first(); rendezvous != nullptr; rendezvous = rendezvous->after) {
    if (rendezvous->descriptor != nullptr) {
      ucp_am_data_release(worker, std::exchange(rendezvous->descriptor, nullptr));
    }
  }
}

void UcpRendezvousList::clear() noexcept {
  while (!all_.isEmpty()) {
    take(all_.first());
  }
}

} // namespace torch_ucx_rpc
