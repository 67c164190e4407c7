#pragma once

#include "messaging/connection.h"
#include "messaging/event_buffer.h"
#include "messaging/message.h"
#include "messaging/push_share.h"
#include "peers/peer.h"
#include "transport/transport.h"

#include <memory>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

// Sends messages: an active message for the body and one for each piece of a span. The first message to a peer makes
// its endpoint. Messages that wait are in the Connection of their peer. All functions need the worker lock.
//
// A message may have to wait here:
// - Until the peer admits this worker. A peer that was asked to do so (kJoin) refuses everything else until then.
// - Until a device has computed its tensors, because UCX reads memory without regard to streams.
// - Until another endpoint takes the place of one that has failed (Connection::State::kResuming). Messages that left
//   over the failed one are kept, and leave again unless the peer has them.
// - For its turn. At most PushShare::parts() parts are under way to a peer by rendezvous, and at most
//   OutgoingLoad::kMaxEagerBytes of eager messages. Requests, answers and puts have these limits each. Messages leave
//   in the order of their calls. Answers do not wait for requests, and messages to one peer do not wait for those to
//   another. A waiting message costs little, and a waiting request can be canceled.
class Outbox {
 public:
  Outbox(
      Transport& transport, const Identity& self, Connections& connections, const PushShare& share, EventBuffer& events)
      : transport_(transport), self_(self), connections_(connections), share_(share), events_(events) {}

  // Sends an addressed message to `message->to`, once its tensors are ready and it is its turn. The message goes to
  // EventBuffer::addSent(), exactly once, when the transport is done with it.
  void send(std::unique_ptr<OutgoingMessage> message);
  // Sends a control frame.
  void sendControl(Peer& to, wire::Kind kind, uint64_t callId = 0, Bytes body = {});

  // Sends to a ready peer the messages that can leave now. Must not be called inside a transport callback.
  void startDeferred(Connection& connection);

  // Whether answers or control frames wait for retryStranded(), after an error of this process such as a full file
  // table. Their peers are healthy, and may wait for them. A request does not strand: its caller learns of the failure.
  bool hasStranded() const {
    return stranded_ != 0;
  }
  void retryStranded();
  // A sentence for the log.
  std::string describeStranded() const;

  // From now on, reaches a peer of this machine over the network. Call it if one of the two workers gets nothing over
  // shared memory. Messages under way stay in shared memory, and arrive when it works again. They no longer take the
  // room of later messages. Changes nothing if it returns an error.
  Error moveToNetwork(Connection& connection);

  // Resumption: makes another endpoint, and sends over it the messages that the peer does not have. Does nothing unless
  // the connection is resuming. Changes nothing if no endpoint can be made.
  void resume(Connection& connection);
  // Tells the peer which frames have come. With `mustSendAgain`, also asks the peer for the others.
  void acknowledge(Connection& connection, bool mustSendAgain = false);

  // Gives up a request that waits here. Returns false if no request with this id does.
  bool cancel(Peer& to, uint64_t callId);

  // Call it when the peer has admitted this worker. It sends the messages that have waited for that.
  void onAdmitted(Peer& peer);

  // Ends all messages to a peer that is gone. Messages that UCX still holds end later (see Transport::abandon()).
  void abandon(Peer& peer);

  // Fails the messages that wait, and all later ones. Call it right before the transport is closed.
  void close();

  // The number of messages that were given to send() and have neither been sent nor failed. Messages to peers that are
  // gone, or that have not admitted this worker, do not count. Without an endpoint, only held messages count. While the
  // connection resumes, kept messages and those that wait for their turn count too.
  size_t underWay() const;

 private:
  // Whether the tensors of a message are ready. True also if the message will fail anyway. Sets its error if the device
  // has failed.
  bool isReady(const Connection& connection, OutgoingMessage& message) const;
  bool canLeave(const Connection& connection) const {
    return !isClosed_ && connection.state() != Connection::State::kClosed;
  }
  // Whether a message must wait. Sets its `waitsFor`.
  bool mustWait(const Connection& connection, OutgoingMessage& message) const;
  // Sends the held messages that no longer have to wait.
  void sendHeld(Connection& connection);
  void enqueue(Connection& connection, std::unique_ptr<OutgoingMessage> message);
  // Sends or fails the first message of a queue, which must not be empty.
  void startFirst(Connection& connection, size_t queue);
  void retryStranded(Connection& connection);
  // Fails the messages that wait. Call it when canLeave() is false.
  void failWaiting(Connection& connection);
  // `room` counts the message. It is null for a control frame, and for a message that enqueue() expects to fail.
  void start(Connection& connection, std::unique_ptr<OutgoingMessage> message, OutgoingLoad* room);
  // Makes the endpoint, unless there is one, or the message must not leave.
  Error connect(Connection& connection, const OutgoingMessage& message);
  Error makeEndpoint(Connection& connection);
  // Sends the frames of a message that the peer does not have. Unless the message is kept, this may destroy it.
  void sendFrames(Connection& connection, OutgoingMessage& message);
  // Call it when the transport is done with some parts of a message, over this endpoint.
  void finish(OutgoingMessage& message, EndpointId endpoint, size_t parts, Error error);
  void freeRoom(Connection& connection, OutgoingMessage& message);
  // For messages that outlast their endpoint.
  void sendAgain(Connection& connection);
  void endKept(Connection& connection);
  // Makes the receiver drop the parts of a message whose other parts cannot leave. Otherwise parts that wait here to be
  // fetched would never end.
  void withdraw(Connection& connection, const OutgoingMessage& message);

  Transport& transport_;
  const Identity& self_;
  Connections& connections_;
  const PushShare& share_;
  EventBuffer& events_;
  size_t stranded_ = 0; // messages that wait for retryStranded(), of all connections
  bool isClosed_ = false;
};

} // namespace torch_ucx_rpc
