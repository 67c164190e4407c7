#pragma once

#include "agent/mail.h"
#include "transport/transport.h"

#include <memory>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

// Sends whole messages: one active message for the body, one for each span. Endpoints are made with the first message
// to a peer. A peer that has been asked to admit this worker to a group (kJoin) refuses everything else until it has: what is for
// it waits here for that long. Everything here runs under the worker lock.
class Outbox {
 public:
  Outbox(Transport& transport, Deliveries& deliveries) : transport_(transport), deliveries_(deliveries) {}

  // Sends an addressed message to `message->to`. It comes back in Deliveries::sent, exactly once, when UCX is done with it.
  void send(std::unique_ptr<OutgoingMessage> message);

  // The peer behind an endpoint; null for one that is unknown.
  Peer* peerOf(EndpointId endpoint) const;

  // The peer has admitted this worker.
  void onAdmitted(Peer& peer);

  // Ends everything under way to a peer that is gone.
  void abandon(Peer& peer);

  // From now on everything fails; the transport is about to be closed.
  void close();

  // Messages that the transport has not finished.
  size_t underWay() const {
    return underWay_;
  }

 private:
  Error connect(Peer& peer);
  void finish(OutgoingMessage* message, size_t parts, Error error);

  Transport& transport_;
  Deliveries& deliveries_;
  std::unordered_map<EndpointId, Peer*> peers_;
  // By who has been asked to admit this worker and has not done so.
  std::unordered_map<Peer*, std::vector<std::unique_ptr<OutgoingMessage>>> waiting_;
  size_t underWay_ = 0;
  bool isClosed_ = false;
};

} // namespace torch_ucx_rpc
