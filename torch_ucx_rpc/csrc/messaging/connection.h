#pragma once

#include "messaging/kept_messages.h"
#include "messaging/message.h"
#include "messaging/push_share.h"
#include "messaging/receiving.h"
#include "peers/peer.h"
#include "transport/transport.h"
#include "wire/replay_window.h"
#include "wire/seal.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// The messages of one queue that the transport has not finished. Eager ones that are kept for resumption count until
// the peer has them.
struct OutgoingLoad {
  // The most eager bytes for one peer. Requests, answers and puts have this limit each. UCX queues eager bytes in its
  // own memory while the peer does not read, for instance because it is stopped. UCX never gives up a message in that
  // queue, even if its call has timed out.
  static constexpr uint64_t kMaxEagerBytes = 8ull * 1024 * 1024;
  // The bytes that a message costs the transport in addition to its body.
  static constexpr uint64_t kEagerOverhead = 512;

  size_t parts = 0; // parts that travel by rendezvous
  uint64_t eagerBytes = 0;

  // Whether the message may leave now. A message larger than a limit leaves once no other is under way.
  bool hasRoomFor(const OutgoingMessage& message, const PushShare& share) const {
    if (message.rendezvousParts() == 0) {
      return eagerBytes == 0 || eagerBytes + eagerBytesOf(message) <= kMaxEagerBytes;
    }
    return parts == 0 || parts + message.rendezvousParts() <= share.parts();
  }
  void account(const OutgoingMessage& message, bool begins) {
    if (message.rendezvousParts() == 0) {
      eagerBytes += begins ? eagerBytesOf(message) : -eagerBytesOf(message);
    } else {
      parts += begins ? message.rendezvousParts() : -message.rendezvousParts();
    }
  }
  static uint64_t eagerBytesOf(const OutgoingMessage& message) {
    return message.body.size() + kEagerOverhead;
  }
};

// Everything between this worker and one life of a peer. It has the endpoint, the seals, the time of silence, and the
// messages that wait or are being received. The first message to or from the peer makes the connection. It lives as
// long as the agent, since operations of the transport may end late and name it.
//
// The worker lock guards all of it. Peer holds the values that other threads read.
//
// transition() alone changes the state, with one exception. The end of the peer closes the connection at once and for
// good. Any thread may note that end in Peer::moveTo().
//
//   state      means                                               event          next
//   kUnmet     there is no endpoint; the next message makes one    kConnected     kOpen
//   kOpen      messages leave over the endpoint                    kDisconnected  kUnmet
//                                                                  kBroken        kResuming
//   kResuming  the endpoint has failed, and the peer may live:     kConnected     kOpen
//              Retries makes another one, for the messages that
//              the peer does not have
//   kClosed    the peer has left or failed; messages fail, except  none
//              a goodbye, which tells the peer so
//
// A peer that was asked to admit this worker (kJoin) refuses everything else until it has done so (Peer::hasAdmitted).
// Until then only goodbyes and the join leave. The join leaves again over each new endpoint.
class Connection {
 public:
  enum class State : uint8_t { kUnmet, kOpen, kResuming, kClosed };
  enum class Event : uint8_t {
    kConnected, // the endpoint has been made
    kDisconnected, // the endpoint has failed because of an error of this process; the peer is healthy
    kBroken, // the endpoint has failed, and can be replaced: see mayResume()
  };

  explicit Connection(Peer& peer);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Peer& peer() const {
    return peer_;
  }
  State state() const {
    return peer_.isThere() ? state_ : State::kClosed;
  }
  void transition(Event event);
  // Notes the new endpoint of the path in use, or its failure, and makes the transition.
  void setEndpoint(std::optional<EndpointId> endpoint);

  bool isJoining() const {
    return !peer_.hasAdmitted.load(std::memory_order_relaxed) && state() != State::kClosed;
  }
  // Whether messages outlast the endpoint (docs/development/connection.md). They do not if a dead peer would look like
  // a healthy one. A join outlasts the endpoint even if calls do not, because the peer accepts repeated joins.
  bool mayResume() const {
    const auto& does = isJoining() ? peer_.isEndSeen : peer_.mayResume;
    return does.load(std::memory_order_relaxed) && state() != State::kClosed;
  }
  // Call it when the endpoint has failed or is given up, and mayResume() is true.
  void breakOff(const std::string& why);

  // A queue has the messages of one kind that leave in one way: eagerly or by rendezvous. Small messages do not wait
  // behind large ones, nor answers behind requests. Control frames are few and small, and never wait: they have no
  // queue.
  static constexpr size_t kQueues = 6;
  static size_t queueOf(const OutgoingMessage& message) {
    return queueOf(message.header.kind, message.rendezvousParts() == 0);
  }
  static size_t queueOf(wire::Kind kind, bool isEager) {
    const size_t first = kind == wire::Kind::kRequest ? 0 : kind == wire::Kind::kResponse ? 2 : 4;
    return first + (isEager ? 1 : 0);
  }

  // A way to the peer. Its loads stay where they are, since messages point to them.
  struct Path {
    std::optional<EndpointId> endpoint;
    OutgoingLoad loads[kQueues];
  };
  Path& path() {
    return paths.front();
  }
  const std::optional<EndpointId>& endpoint() const {
    return paths.front().endpoint;
  }

  // Outbox uses the members up to `outgoing`. In `outgoing`, Inbox and Retries note what the peer has, and what it asks
  // for.
  //
  // The first path is in use. The others are old paths over shared memory, to a peer that has moved to the network.
  // Outbox closes them only when the peer is gone: UCX would free memory that the peer may still read. Messages under
  // way over them may never end, and take no room of the first path.
  std::list<Path> paths = std::list<Path>(1);
  struct Outgoing {
    using Messages = std::vector<std::unique_ptr<OutgoingMessage>>;
    Messages held; // see OutgoingMessage::Wait
    Bytes join; // the record of this worker, until the peer has admitted it
    std::multimap<uint64_t, std::unique_ptr<OutgoingMessage>> waiting[kQueues]; // until their turn comes, by call id
    std::vector<uint64_t> withdrawn; // calls that have left in part, and that the peer must cancel
    KeptMessages kept;
    bool mustSendAgain = false; // the peer asks for what it does not have
    uint16_t endpoints = 0; // how many have been made: wire::Header::endpoint
    uint64_t sentAgainBelow = 1; // frames below this number left, or left again, before all later frames
    std::string whyBroken; // why the endpoint must be replaced; empty while it is good
    size_t underWay = 0; // messages that the transport has not finished, or that wait for their turn
  } outgoing;

  // Receiver and Inbox use the following members. Acknowledging and resuming change some of them too.
  struct Incoming {
    wire::ReplayWindow received{1}; // frames with numbers
    std::map<uint64_t, Announcement> announced; // by number; frames without one have keys from the upper end down
    uint64_t unnumbered = 0; // how many frames without a number have been announced
    uint64_t unacknowledgedBytes = 0; // bytes of frames that came after the last acknowledgement left
    bool isOwing = false; // in Connections::owing
    uint64_t lacked = 0; // the result of lacking() when Retries looked last
    std::vector<Receiving::Entry> stalled; // messages whose next parts the peer must announce again
    uint16_t endpoint = 0; // the peer's latest endpoint, as far as its frames have shown
    bool mayBeOutdated = false; // a receive may wait for an earlier endpoint; Retries checks that

    uint64_t inFlightBytes = 0;
    size_t inFlightPieces = 0;
    bool isOldestsTurn = true;
    std::vector<Receiving::Entry> starting; // messages that wait for memory
    std::vector<Receiving::Entry> waiting; // messages with parts that have not begun, in the order of waiting

    // The number of the first frame that is neither here nor announced although later frames have come; 0 if there is
    // none.
    uint64_t lacking() const;

    // Notes the peer's endpoint over which a frame has come. True if it is the first frame over a new one.
    bool noteEndpoint(uint16_t number);
    // Whether the peer has given up an endpoint. Announcements over it are void.
    bool isOutdated(uint16_t number) const;
    // This side's ends of endpoints that the peer has given up, and for which receives still wait.
    std::vector<const void*> outdatedOrigins();

    // The message whose part is received next: by turns the oldest message, and the message with the fewest parts left.
    // So small messages pass large ones, and large messages still end one after another.
    std::vector<Receiving::Entry>::iterator next();
  } incoming;

  // Work for the next round.
  bool isPinged = false; // the peer has asked for a sign of life
  bool mustAcknowledge = false; // much has come that this worker has not acknowledged
  bool isMoving = false; // one of the two workers gets nothing over shared memory: see SharedMemoryRepair

  // Only in a job with a secret. Outbox seals frames with `sealer`, and Inbox checks frames with `opener`.
  std::optional<wire::FrameSeal> sealer;
  std::optional<wire::FrameSeal> opener;

  // How long nothing has come from the peer. Inbox, Receiver and Outbox set heardSinceCheck. Heartbeat sets the other
  // members. A failed endpoint sets some of them too.
  struct Silence {
    bool heardSinceCheck = false; // something has come since Heartbeat looked last
    bool isAsked = false; // a sign of life has been asked for
    bool isSuspect = false; // the peer is suspect, and nothing has come since
    bool isDoubted = false; // its process has probably ended: see Heartbeat::doubt()
    std::chrono::milliseconds lasted{0};
  } silence;
  bool isHeard = false; // Heartbeat knows that something has come
  // The state of resumption, whose rounds Retries counts.
  bool isUnproven = false; // the endpoint has failed, and nothing has come since
  std::string whyBroken; // empty once the log has it
  unsigned failures = 0; // endpoints in a row that have failed, and over which nothing has come
  unsigned roundsToResume = 0; // until another endpoint is made
  unsigned roundsStalled = 0; // rounds in which this worker has waited for a new announcement
  unsigned roundsOutdated = 0; // rounds in which a receive has waited for an endpoint that the peer has given up

  // The number of a frame that the peer may have to send again after an endpoint of this worker has failed. 0: none.
  uint64_t lacking() const {
    return peer_.timesResumed.load(std::memory_order_relaxed) == 0 ? 0 : incoming.lacking();
  }
  // Whether Retries has something to do for this connection.
  bool mustRetry() const {
    return state() == State::kResuming || !incoming.stalled.empty() || incoming.mayBeOutdated || lacking() != 0;
  }

  // Whether a message to or from the peer waits for a device. No event announces the end of a device's work.
  bool waitsForDevice() const;

 private:
  friend class Connections;

  Peer& peer_;
  State state_ = State::kUnmet; // while the peer is there
  // Whether this connection is in Connections::ready_, and how urgent its work is.
  enum class Attention : uint8_t { kNone, kEachRound, kNow } attention_ = Attention::kNone;
};

// The connections of this worker. Guarded by the worker lock.
//
// Callbacks of the transport must neither send nor receive. They note in a connection what there is to do, and make the
// connection ready. Messenger::startDeferredWithWorkerLock() then visits only the ready connections. A round without
// ready connections costs nothing, however many peers there are.
class Connections {
 public:
  // The connection of a peer, made if there is none.
  Connection& of(Peer& peer) {
    return peer.connection != nullptr ? *peer.connection : add(peer);
  }
  // The connection with this endpoint. Null if there is none.
  Connection* find(EndpointId endpoint) const;
  const std::vector<std::unique_ptr<Connection>>& all() const {
    return all_;
  }

  // Notes that the connection has work in the next round.
  void makeReady(Connection& connection) {
    note(connection, Connection::Attention::kNow);
  }
  // Notes that the connection may have work in the next round, which no event announces.
  void keepLooking(Connection& connection) {
    note(connection, Connection::Attention::kEachRound);
  }

  // Notes that a frame with a number has come, which this worker must acknowledge.
  void noteArrival(Connection& connection, uint64_t bytes);
  // The connections over which numbered frames have come since takeOwing(). The frames may be acknowledged by now.
  const std::vector<Connection*>& owing() const {
    return owing_;
  }
  std::vector<Connection*> takeOwing() {
    return std::exchange(owing_, {});
  }

  // One round: hands each ready connection to `work`, which may make it ready again for the next round. If `work`
  // throws, the connections that it has not seen stay ready.
  template <typename Work>
  void forEachReady(Work work) {
    const size_t count = ready_.size();
    for (size_t index = 0; index < count; ++index) {
      Connection& connection = *ready_[index];
      if (std::exchange(connection.attention_, Connection::Attention::kNone) != Connection::Attention::kNone) {
        work(connection);
      }
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  // Whether the next round has something to do already.
  bool hasReady() const {
    return std::ranges::any_of(
        ready_, [](const Connection* one) { return one->attention_ == Connection::Attention::kNow; });
  }
  bool waitsForDevice() const {
    return std::ranges::any_of(ready_, &Connection::waitsForDevice);
  }

 private:
  Connection& add(Peer& peer);
  void note(Connection& connection, Connection::Attention attention) {
    if (connection.attention_ == Connection::Attention::kNone) {
      ready_.push_back(&connection);
    }
    connection.attention_ = std::max(connection.attention_, attention);
  }

  std::vector<std::unique_ptr<Connection>> all_;
  std::vector<Connection*> ready_;
  std::vector<Connection*> owing_;
};

} // namespace torch_ucx_rpc
