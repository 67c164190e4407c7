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

// Sends messages: an active message for the body and one for each piece of a span. The first message to a peer makes
// its endpoint. All functions need the worker lock.
//
// A message may have to wait here:
// - Until the peer admits this worker. A peer that was asked to do so (kJoin) refuses everything else until then.
// - Until a device has computed its tensors, because UCX reads memory without regard to streams.
// - For its turn. Of the parts that travel by rendezvous, only PushShare::parts() are under way to a peer, of requests
//   and of answers each. Messages leave in the order of their calls. Answers do not wait for requests, nor messages to
//   one peer for those to another. A message that waits costs next to nothing, and can be canceled.
class Outbox {
 public:
  // The most eager bytes that the transport has not finished, for one peer, of requests and of answers each. UCX queues
  // them in memory of its own while the peer does not read (while it is stopped, for one). It never gives up a message
  // in that queue, not even one whose call has timed out.
  static constexpr uint64_t kMaxEagerBytes = 8ull * 1024 * 1024;
  // The bytes that a message costs the transport beside its body.
  static constexpr uint64_t kEagerOverhead = 512;

  Outbox(Transport& transport, const PushShare& share, EventBuffer& events)
      : transport_(transport), share_(share), events_(events) {}

  // Sends an addressed message to `message->to`, once its tensors are ready and it is its turn. The message goes to
  // EventBuffer::addSent(), exactly once, when the transport is done with it.
  void send(std::unique_ptr<OutgoingMessage> message);

  // Sends the messages that can leave now. Must not be called inside a transport callback.
  void startDeferred();

  // Whether answers or control frames have failed over an error of this process, such as a full file table, and wait
  // for retryStranded(). Their peers are well, and may wait for them. A request does not strand: its caller learns of
  // the failure.
  bool hasStranded() const {
    return !stranded_.empty();
  }
  void retryStranded();
  // A sentence for the log.
  std::string describeStranded() const;

  // Whether messages wait for a device. No event announces the end of its work: startDeferred() asks.
  bool waitsForDevice() const {
    return !unready_.empty();
  }

  // Reaches a peer of this machine over the network from now on, because one of the two hears nothing over shared
  // memory. Messages under way stay where they are, and no longer take the room of later ones: they arrive when the
  // shared memory works again. On an error nothing has changed.
  Error moveToNetwork(Peer& peer);

  // Gives up a request that has not left. False if none with this id waits here.
  bool cancel(Peer& to, uint64_t callId);

  // The peer behind an endpoint; null for one that is unknown.
  Peer* peerOf(EndpointId endpoint) const;

  // The peer has admitted this worker: sends the messages that have waited for that.
  void onAdmitted(Peer& peer);

  // Ends all messages to a peer that is gone. Those that UCX cannot let go of yet end later (see Transport::abandon()).
  void abandon(Peer& peer);

  // Fails the messages that wait, and all later ones. To be called right before the transport is closed.
  void close();

  // The number of messages that were given to send() and have neither been sent nor failed. Messages to peers that are
  // gone, that have not admitted this worker, or that have no endpoint yet do not count.
  size_t underWay() const;

 private:
  // Messages to one peer of one kind: those that go eagerly, or those that do not. Small messages do not wait behind
  // large ones.
  struct Queue {
    size_t rendezvous = 0; // parts under way
    uint64_t eagerBytes = 0; // under way
    std::multimap<uint64_t, std::unique_ptr<OutgoingMessage>> waiting; // by call id

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
  void retireQueue(const QueueKey& key);
  Queue& queueOf(const OutgoingMessage& message) {
    return queues_[QueueKey(message.to, message.header.kind, message.rendezvousParts() == 0)];
  }
  // Whether the tensors of a message are ready. True also if the message will fail anyway. Sets its error if the device
  // has failed.
  bool isReady(OutgoingMessage& message) const;
  bool canLeave(const OutgoingMessage& message) const {
    return !isClosed_ && message.to->isThere();
  }
  void sendReady();
  void enqueue(std::unique_ptr<OutgoingMessage> message);
  void startFirst(Queue& queue);
  // `queue` counts the message. It is null for a message that is not queued, or that fails at once.
  void start(std::unique_ptr<OutgoingMessage> message, Queue* queue);
  // Makes the endpoint, unless there is one.
  Error connect(const OutgoingMessage& message);
  void finish(OutgoingMessage* message, Queue* queue, size_t parts, Error error);
  // Has the receiver let go of the parts of a message whose other parts cannot leave. Those that wait here until it
  // fetches them would never end otherwise.
  void withdraw(const OutgoingMessage& message);
  void sendCancels();

  Transport& transport_;
  const PushShare& share_;
  EventBuffer& events_;
  std::unordered_map<EndpointId, Peer*> peers_;
  // Messages that wait for admission, by the peer that was asked for it.
  std::unordered_map<Peer*, std::vector<std::unique_ptr<OutgoingMessage>>> unadmitted_;
  std::vector<std::unique_ptr<OutgoingMessage>> unready_;
  std::map<QueueKey, Queue> queues_;
  // Of peers that have moved to the network: their endpoints over shared memory, and queues of what is under way there.
  std::unordered_multimap<const Peer*, EndpointId> retiredEndpoints_;
  std::multimap<QueueKey, Queue> retiredQueues_;
  std::vector<std::unique_ptr<OutgoingMessage>> stranded_;
  std::vector<std::pair<Peer*, wire::Header>> withdrawn_; // requests that startDeferred() cancels at their callees
  std::vector<Queue*> unblocked_; // queues that got room since startDeferred() was called last
  bool isClosed_ = false;
};

} // namespace torch_ucx_rpc
