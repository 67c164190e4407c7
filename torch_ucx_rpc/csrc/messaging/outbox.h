#pragma once

#include "messaging/event_buffer.h"
#include "messaging/message.h"
#include "messaging/push_share.h"
#include "transport/transport.h"

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Sends whole messages: one active message for the body, one for each piece of a span. Endpoints are made with the
// first message to a peer. A peer that has been asked to admit this worker to a group (kJoin) refuses everything else
// until it has: what is for it waits here for that long. Everything here runs under the worker lock.
//
// A message waits first of all until a device has made its tensors: UCX reads without regard to streams.
//
// What travels by rendezvous leaves a few parts at a time: PushShare::parts() of requests and of answers to each peer.
// The rest wait here, where they cost next to nothing and can be canceled, in the order of their calls. Answers do not
// wait for requests, nor one peer's messages for another's.
class Outbox {
 public:
  // Bytes that travel eagerly and that the transport has not finished, to a peer, of requests and of answers each. UCX
  // queues them in memory of its own when the peer does not read, a stopped process for one, and never gives a
  // timed-out one back.
  static constexpr uint64_t kMaxEagerBytes = 8ull * 1024 * 1024;
  // What a message costs the transport beside its body.
  static constexpr uint64_t kEagerOverhead = 512;

  Outbox(Transport& transport, const PushShare& share, EventBuffer& events)
      : transport_(transport), share_(share), events_(events) {}

  // Sends an addressed message to `message->to`, as soon as its tensors are ready and it is its turn. It goes to
  // EventBuffer::addSent(), exactly once, when UCX is done with it.
  void send(std::unique_ptr<OutgoingMessage> message);

  // Sends messages that can leave now. Not inside a transport callback.
  void startDeferred();

  // Whether messages that are no requests have failed over an error of this process, such as a full file table, and
  // wait for another try: retryStranded(). Their peers are well, and may be waiting for them. (A request's failure is
  // told to its caller.)
  bool hasStranded() const {
    return !stranded_.empty();
  }
  void retryStranded();
  // A sentence for the log.
  std::string describeStranded() const;

  // Whether messages wait for a device. Nothing announces that it is done: startDeferred() asks.
  bool waitsForDevice() const {
    return !unready_.empty();
  }

  // Gives up a request that has not left; false if there is none.
  bool cancel(Peer& to, uint64_t callId);

  // The peer behind an endpoint; null for one that is unknown.
  Peer* peerOf(EndpointId endpoint) const;

  // The peer has admitted this worker.
  void onAdmitted(Peer& peer);

  // Ends everything under way to a peer that is gone; what UCX cannot let go of yet later (see Transport::abandon()).
  void abandon(Peer& peer);

  // From now on everything fails; the transport is about to be closed.
  void close();

  // Messages that the transport has not finished, those included that it has not been given yet; none of those to peers
  // that are gone.
  size_t underWay() const;

 private:
  // To a peer, of a kind, eager or not: small messages do not wait behind large ones.
  struct Queue {
    size_t rendezvous = 0; // parts under way
    uint64_t eagerBytes = 0; // under way
    std::multimap<uint64_t, std::unique_ptr<OutgoingMessage>> waiting; // by the ids of their calls

    // A message that is larger than a limit leaves alone.
    bool hasRoomFor(const OutgoingMessage& message, const PushShare& share) const {
      if (message.rendezvousParts() == 0) {
        return eagerBytes == 0 || eagerBytes + eagerBytesOf(message) <= kMaxEagerBytes;
      }
      return rendezvous == 0 || rendezvous + message.rendezvousParts() <= share.parts();
    }
    void account(const OutgoingMessage& message, bool begins) {
      if (message.rendezvousParts() == 0) {
        eagerBytes += begins ? eagerBytesOf(message) : -eagerBytesOf(message);
      } else {
        rendezvous += begins ? message.rendezvousParts() : -message.rendezvousParts();
      }
    }
  };
  static uint64_t eagerBytesOf(const OutgoingMessage& message) {
    return message.body.size() + kEagerOverhead;
  }
  // Control frames are few and small, and never wait.
  static bool isQueued(const OutgoingMessage& message) {
    return message.header.kind == wire::Kind::kRequest || message.header.kind == wire::Kind::kResponse;
  }
  using QueueKey = std::tuple<const Peer*, wire::Kind, bool>;
  Queue& queueOf(const OutgoingMessage& message) {
    return queues_[QueueKey(message.to, message.header.kind, message.rendezvousParts() == 0)];
  }
  // Also true for a message that fails anyway; it has an error if the device has.
  bool isReady(OutgoingMessage& message) const;
  bool canLeave(const OutgoingMessage& message) const {
    return !isClosed_ && message.to->isThere();
  }
  void sendReady();
  void enqueue(std::unique_ptr<OutgoingMessage> message);
  void startFirst(Queue& queue);
  // `queue`: the one that counts it; null for a message that is not queued, or fails at once.
  void start(std::unique_ptr<OutgoingMessage> message, Queue* queue);
  Error connect(Peer& peer);
  void finish(OutgoingMessage* message, Queue* queue, size_t parts, Error error);

  Transport& transport_;
  const PushShare& share_;
  EventBuffer& events_;
  std::unordered_map<EndpointId, Peer*> peers_;
  // By who has been asked to admit this worker and has not done so.
  std::unordered_map<Peer*, std::vector<std::unique_ptr<OutgoingMessage>>> unadmitted_;
  std::vector<std::unique_ptr<OutgoingMessage>> unready_;
  std::map<QueueKey, Queue> queues_;
  std::vector<std::unique_ptr<OutgoingMessage>> stranded_;
  std::vector<Queue*> unblocked_; // since startDeferred() was called last
  bool isClosed_ = false;
};

} // namespace torch_ucx_rpc
