#pragma once

#include "peers/peer.h"

namespace torch_ucx_rpc {

// An object that settles its accounts with a peer that is gone.
class PeerObserver {
 public:
  virtual ~PeerObserver() = default;
  // Called once for each peer that is gone, left or failed, after its state says so. Any thread, without the worker lock.
  virtual void onPeerGone(Peer& peer) = 0;
};

} // namespace torch_ucx_rpc
