#pragma once

#include "peers/peer.h"

#include <cstdint>
#include <utility>

namespace torch_ucx_rpc {

// A request of another worker that has been taken in and not been answered: counted with its caller
// (Peer::requestsOpen) for as long as this lives. Destroyed after the answer is on its way, since a worker that leaves
// waits for the count.
class OpenRequest {
 public:
  OpenRequest(Peer& from, uint64_t callId) : from_(&from), callId_(callId) {
    from.requestsOpen.fetch_add(1);
  }
  OpenRequest(OpenRequest&& other) noexcept : from_(std::exchange(other.from_, nullptr)), callId_(other.callId_) {}
  OpenRequest& operator=(OpenRequest&&) = delete;
  ~OpenRequest() {
    if (from_ != nullptr) {
      from_->requestsOpen.fetch_sub(1);
    }
  }

  Peer& from() const {
    return *from_;
  }
  uint64_t callId() const {
    return callId_;
  }

 private:
  Peer* from_;
  uint64_t callId_;
};

} // namespace torch_ucx_rpc
