#include "transport/ucp/ucp_rendezvous.h"

#include <new>
#include <utility>

namespace torch_ucx_rpc {

UcpRendezvous* UcpRendezvousList::add(void* descriptor, const void* origin) noexcept {
  auto* rendezvous = new (std::nothrow) UcpRendezvous{descriptor, origin};
  if (rendezvous != nullptr) {
    all_.push(rendezvous);
  }
  return rendezvous;
}

std::unique_ptr<UcpRendezvous> UcpRendezvousList::take(void* handle) noexcept {
  std::unique_ptr<UcpRendezvous> rendezvous(static_cast<UcpRendezvous*>(handle));
  all_.remove(rendezvous.get());
  return rendezvous;
}

void UcpRendezvousList::release(ucp_worker_h worker, void* handle) noexcept {
  const std::unique_ptr<UcpRendezvous> rendezvous = take(handle);
  if (rendezvous->descriptor != nullptr) {
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
