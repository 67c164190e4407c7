#pragma once

#include "agent/mail.h"
#include "transport/transport.h"

#include <memory>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

// Sends whole messages: one active message for the body, one for each span. Endpoints are made with the first message
// to a peer. Everything here runs under the worker lock.
class Outbox {
 public:
  Outbox(Transport& transport, Deliveries& deliveries) : transport_(transport), deliveries_(deliveries) {}

  // Sends an addressed message to `message->to`, once its tensors are ready. It comes back in Deliveries::sent, exactly once, when UCX is
  // done with it.
  void send(std::unique_ptr<OutgoingMessage> message);

  // Sends what has become ready. Not inside a transport callback.
  void settle();

  // Whether there are messages that wait for a device. Nothing announces that it is done.
  bool waitsForDevice() const {
    return !unready_.empty();
  }

  // The peer behind an endpoint; null for one that is unknown.
  Peer* peerOf(EndpointId endpoint) const;

  // Ends everything under way to a peer that is gone.
  void abandon(Peer& peer);

  // From now on everything fails, what is not ready too; the transport is about to be closed.
  void close();

  // Messages that the transport has not finished, or not begun.
  size_t underWay() const {
    return underWay_;
  }

 private:
  Error connect(Peer& peer);
  // False, and nothing done, while its tensors are not ready.
  bool sendIfReady(OutgoingMessage* message);
  void sendReady(OutgoingMessage* message);
  template <typename Condition>
  void failUnready(Condition condition, const Error& error);
  void finish(OutgoingMessage* message, size_t parts, Error error);

  Transport& transport_;
  Deliveries& deliveries_;
  std::unordered_map<EndpointId, Peer*> peers_;
  std::vector<OutgoingMessage*> unready_;
  size_t underWay_ = 0;
  bool isClosed_ = false;
};

} // namespace torch_ucx_rpc
