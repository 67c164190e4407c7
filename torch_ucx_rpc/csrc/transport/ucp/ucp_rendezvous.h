#pragma once

#include "base/intrusive_list.h"

#include <ucp/api/ucp.h>

#include <memory>

namespace torch_ucx_rpc {

// A message that UCX has announced and that waits at its sender. Listeners get this object's address as the handle,
// never the address of UCX's descriptor. A listener may still have the handle of a message that it failed to store. UCX
// may then give the same descriptor out again.
struct UcpRendezvous {
  void* descriptor; // null if UCX has it back
  const void* origin; // UCX's endpoint for it
  UcpRendezvous* before = nullptr; // in UcpRendezvousList
  UcpRendezvous* after = nullptr;
};

// The rendezvous of one UCX worker that listeners have neither received nor released. The worker lock guards them.
class UcpRendezvousList {
 public:
  // Adds a message, in UCX's callback. Returns null if memory runs out.
  UcpRendezvous* add(void* descriptor, const void* origin) noexcept;
  // Takes out a rendezvous that is to be received. The caller owns its descriptor, which is null if UCX has it back.
  std::unique_ptr<UcpRendezvous> take(void* handle) noexcept;
  // Gives up a rendezvous that will not be received.
  void release(ucp_worker_h worker, void* handle) noexcept;

  // Gives all descriptors back to UCX. The handles stay valid.
  void releaseDescriptors(ucp_worker_h worker) noexcept;
  void clear() noexcept;

 private:
  IntrusiveList<UcpRendezvous> all_;
};

} // namespace torch_ucx_rpc
