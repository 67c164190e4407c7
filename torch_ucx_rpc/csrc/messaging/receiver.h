#pragma once

#include "memory/devices_in_use.h"
#include "memory/host_pool.h"
#include "messaging/connection.h"
#include "messaging/device_allocation.h"
#include "messaging/event_buffer.h"
#include "messaging/event_handlers.h"
#include "messaging/message.h"
#include "messaging/receive_window.h"
#include "messaging/receiving.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// The parts of a messenger that Receiver and Inbox use. Both derive from this struct.
struct ReceivingParts {
  Transport& transport_;
  Connections& connections_;
  std::shared_ptr<ReceiveWindow> window_;
  const EventHandlers& handlers_;
  const DevicesInUse& devices_;
  EventBuffer& events_;
  // Any thread calls it, without the worker lock, when memory that startDeferred() waits for is there.
  std::function<void()> onAllocated_;
};

// Receives admitted messages into memory. It asks each peer for a few pieces at a time. Pieces travel one after the
// other on a network. Small messages and signs of life wait behind the pieces that were asked for. Connection::Incoming
// counts these pieces, and has the messages whose pieces wait. All functions need the worker lock.
class Receiver : private ReceivingParts {
 public:
  explicit Receiver(const ReceivingParts& parts) : ReceivingParts(parts) {}

  using Clock = std::chrono::steady_clock;

  // The receiver starts no further message if it would then receive more bytes than this at a time. Messages in
  // parallel arrive no sooner than one after the other, but they need more memory, which is cold. This much hides a
  // network's latency: 160 us at 25 GB/s.
  static constexpr uint64_t kReceivingBytes = 4ull * 1024 * 1024;
  // The limit for memory of devices: two of their largest pieces. One is announced while the other is copied.
  static constexpr uint64_t kReceivingDeviceBytes = 2 * OutgoingMessage::kDevicePieceBytes;
  // A message that has not arrived after this time no longer counts: its sender or the network is slow.
  static constexpr auto kSlow = std::chrono::milliseconds(20);

  // The receiver asks a peer for this many bytes at a time, or for this many pieces if they are larger.
  static constexpr uint64_t kInFlightBytes = 2 * OutgoingMessage::kPieceBytes;
  static constexpr size_t kInFlightPieces = 2;

  // A message whose parts are all known and that waits to be admitted. Its `bytes` and `deviceBytes` wait at the
  // sender.
  struct Announced {
    Connection* from;
    wire::Assembled assembled;
    uint64_t bytes; // for host memory
    uint64_t deviceBytes = 0;
    std::vector<c10::DataPtr> into = {}; // memory that is given for spans, by their index
  };

  // Whether a message of this many more bytes must wait. `now` is an argument for tests.
  bool isBusy(uint64_t more, Clock::time_point now = Clock::now()) const {
    return isBusy(&Receiving::bytes, more, kReceivingBytes, now);
  }
  bool areDevicesBusy(uint64_t more, Clock::time_point now = Clock::now()) const {
    return isBusy(&Receiving::deviceBytes, more, kReceivingDeviceBytes, now);
  }

  // The bytes of a message that will be received into memory of devices. 0 while its body has not arrived.
  uint64_t deviceBytesOf(const wire::Assembled& assembled) const;

  // Makes the connection ready, and startDeferred() then gets memory for the message and receives it.
  void start(Announced announced, Admission admission);

  // Give up parts that are not wanted. The next releaseAll() tells the transport.
  void release(wire::Piece& piece);
  void release(std::vector<wire::Piece>& pieces);
  void release(wire::Assembled& assembled);
  // Gives up a rendezvous by its handle of the transport, unless that is null.
  void releaseHandle(void* rendezvous);

  // These three must not be called inside a transport callback. A round calls them in this order.
  void beginRound() {
    hasFinished_ = false;
  }
  // Starts receives from a ready peer.
  void startDeferred(Connection& connection);
  void releaseAll();

  // Whether a message has been received, or given up, since the last round began.
  bool hasFinished() const {
    return hasFinished_;
  }

  // Whether the message is an answer that no caller awaits any more.
  bool isAbandoned(const Peer& from, const wire::Header& header) const {
    return header.kind == wire::Kind::kResponse && !handlers_.answers->isAwaited(from, header.callId);
  }

  // Gives up the parts of a request that have not begun; its caller has given up the call.
  void cancel(Connection& from, uint64_t callId);

  // Gives up everything that is being received from a peer that is gone.
  void dropPeer(Connection& connection);

  // Gives up all receives that have not begun. Call it right before the transport is closed.
  void close();

 private:
  using Entry = Receiving::Entry;
  using Part = Receiving::Part;
  using Stage = Receiving::Stage;

  bool isBusy(uint64_t Receiving::* bytes, uint64_t more, uint64_t limit, Clock::time_point now) const;
  // Provides memory for what the stage receives. Spans go to the devices that the body names, unless their bytes come
  // from host memory.
  void planMemory(Receiving& receiving);
  std::vector<DeviceAllocation::Span> planDevices(
      std::span<const std::byte> body, const std::vector<wire::Assembled::Span>& spans) const;
  // Takes the allocated memory. Returns false while the allocation runs. Throws if it failed.
  static bool takeMemory(Receiving& receiving);
  // Queues the parts of a message, or gives it up if memory runs out or a device has failed. Returns false while its
  // memory is not there or earlier work uses it.
  bool beginIfFree(Entry receiving);
  // Adds a piece to the parts to be received.
  static void addPart(Receiving& receiving, const wire::Piece& piece, const c10::DataPtr& into);
  // Begins to receive parts, as many as may be in flight from the peer.
  void receiveNextParts(Connection& connection);
  void receivePart(Connection& connection, Entry receiving);
  // The part to receive next. Null if the peer must first announce all parts again.
  Part* nextPart(const Connection& connection, Receiving& receiving);
  // Puts back a part that was not received because its endpoint has failed: the peer announces it again.
  void putBack(Connection& connection, Entry receiving, Part part);
  // Ends a rendezvous that has been received, with all its `bytes`, or that is given up.
  void settle(Announcement& announcement, uint64_t bytes = 0);
  // Gives up the parts that have not begun.
  void giveUp(Entry receiving, const Error& why);
  // Calls giveUp() for each message from a peer that has such parts and for which `isOver` is true.
  template <typename IsOver>
  void giveUpWhere(Connection& connection, const Error& why, const IsOver& isOver);
  // Adds the event of a message, and forgets it, if all its parts are done.
  void finishIfDone(Entry receiving);
  void forget(Entry receiving);

  std::list<Receiving> receiving_; // from all peers, since isBusy() asks for all
  std::list<Receiving> dropped_; // messages of lost peers; the transport still uses their memory
  std::vector<void*> toRelease_; // also from strangers
  bool hasFinished_ = false;
};

} // namespace torch_ucx_rpc
