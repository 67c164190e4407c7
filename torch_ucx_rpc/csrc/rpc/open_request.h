#pragma once

#include "peers/peer.h"

#include <cstdint>
#include <utility>

namespace torch_ucx_rpc {

// Counts a request as open for as long as the object lives, with the peer that sent it (Peer::requestsOpen). To be
// destroyed after the answer is posted: a worker that leaves waits until the count is 0.
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
