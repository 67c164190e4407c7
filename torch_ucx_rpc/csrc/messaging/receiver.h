#pragma once

#include "memory/device_pool.h"
#include "memory/devices_in_use.h"
#include "memory/host_pool.h"
#include "messaging/event_buffer.h"
#include "messaging/event_handlers.h"
#include "messaging/message.h"
#include "messaging/receive_window.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Has admitted messages received into memory, a few pieces of each peer's at a time: on a network they travel one after
// the other, and small messages and signs of life wait behind those that have been asked for. Everything here runs
// under the worker lock.
class Receiver {
 public:
  Receiver(
      Transport& transport,
      std::shared_ptr<ReceiveWindow> window,
      HostPool& pool,
      const EventHandlers& handlers,
      const DevicesInUse& devices,
      EventBuffer& events)
      : transport_(transport),
        window_(std::move(window)),
        pool_(pool),
        handlers_(handlers),
        devices_(devices),
        events_(events) {}

  using Clock = std::chrono::steady_clock;

  // Bytes that are received at a time, of the window. Several messages in parallel arrive no sooner than one after the
  // other, but into more memory, which is cold. Enough to hide a network's latency: 25 GB/s times 160 us.
  static constexpr uint64_t kReceivingBytes = 4ull * 1024 * 1024;
  // What is not there after this does not count any more: it is the sender or the network that is slow.
  static constexpr auto kSlow = std::chrono::milliseconds(20);

  // Bytes that are asked of a peer at a time, and pieces where those are larger.
  static constexpr uint64_t kInFlightBytes = 2 * OutgoingMessage::kPieceBytes;
  static constexpr size_t kInFlightPieces = 2;

  // A message that waits to be admitted, of which so many bytes wait at the sender.
  struct Announced {
    Peer* from;
    wire::Assembled assembled;
    uint64_t bytes;
  };

  // Whether enough is being received, or would be with so many bytes more. Tests tell it the time.
  bool isBusy(uint64_t more, Clock::time_point now = Clock::now()) const;

  // Takes memory for a message; startDeferred() has it received.
  void start(Announced announced, Admission admission);

  // The next startDeferred() tells the transport that they are not wanted.
  void release(wire::Piece& piece);
  void release(std::vector<wire::Piece>& pieces);
  void release(wire::Assembled& assembled);

  // Starts receives and releases. Not inside a transport callback.
  void startDeferred();

  // Whether startDeferred() has more to do already: what it starts may be done at once, and other operations are to run
  // in between.
  bool hasDeferred() const {
    return !due_.empty();
  }

  // Whether a message has been received, or given up, since startDeferred() was called last.
  bool hasFinished() const {
    return hasFinished_;
  }

  // Whether there is memory of a device that is not free yet for what is to be received. Nothing announces that it is.
  bool waitsForDevice() const {
    return !starting_.empty();
  }

  // Whether an answer is for a call that has been given up meanwhile.
  bool isAbandoned(const Peer& from, const wire::Header& header) const {
    return header.kind == wire::Kind::kResponse && !handlers_.answers->isAwaited(from, header.callId);
  }

  // Does not ask for the rest of a request that has been given up.
  void cancel(const Peer& from, uint64_t callId);

  // Gives up what is being received from a peer that is gone.
  void dropPeer(const Peer& peer);

  // Gives up what has not been asked for; the transport is about to be closed.
  void close();

 private:
  // What is received at a time: a piece of a span, or the body.
  struct Part {
    void* rendezvous;
    void* into;
    uint64_t bytes;
    Memory memory;
  };
  // A message being received into memory.
  struct Receiving {
    IncomingMessage message;
    uint64_t bytes = 0;
    Clock::time_point began;
    wire::Assembled assembled; // until its memory is free
    DeviceWork pendingWork; // until then
    std::vector<Part> parts; // from then on
    size_t begun = 0; // of those
    size_t unfinished = 0; // of those begun
    bool isDropped = false;
    Error error;
  };
  using Entry = std::list<Receiving>::iterator;
  // What is received from a peer.
  struct Source {
    bool isDue = false; // in due_
    uint64_t inFlightBytes = 0;
    size_t inFlightPieces = 0;
    bool isOldestsTurn = true;
    std::vector<Entry> waiting; // those that have parts not begun, the oldest first

    // The oldest and the one that has the least left have every other turn: a small one passes a large one, and large
    // ones do not keep each other from being finished.
    std::vector<Entry>::iterator next() {
      return isOldestsTurn ? waiting.begin()
                           : std::min_element(waiting.begin(), waiting.end(), [](Entry one, Entry other) {
                               return one->parts.size() - one->begun < other->parts.size() - other->begun;
                             });
    }
  };

  // Memory for the spans, of devices where the body says so; of the host if the body itself is still to be received.
  void allocateSpans(Receiving& receiving);
  void allocateOnDevices(Receiving& receiving);
  // False, and nothing done, while its memory is not free.
  bool beginIfFree(Entry receiving);
  // For what is not being received yet.
  void reject(Entry receiving, Error error);
  // Notes what is to be received; what came eagerly is copied.
  static void addPart(Receiving& receiving, const wire::Piece& piece, const c10::DataPtr& into);
  void setDue(Source& source);
  void receiveNextParts(Source& source);
  void receivePart(Source& source, Entry receiving);
  // Gives up the parts that have not begun.
  void giveUpRest(Entry receiving, const Error& why);
  // If all its parts are through.
  void finishIfDone(Entry receiving);
  void forget(Entry receiving);

  Transport& transport_;
  const std::shared_ptr<ReceiveWindow> window_;
  HostPool& pool_;
  const EventHandlers& handlers_;
  const DevicesInUse& devices_;
  EventBuffer& events_;

  std::list<Receiving> receiving_;
  std::vector<Entry> starting_; // of those, the ones whose memory is not known to be free
  DevicePool& deviceMemory_ = DevicePool::instance();
  std::list<Receiving> dropped_; // the transport still has their memory
  std::unordered_map<const Peer*, Source> sources_;
  std::vector<Source*> due_; // of which something has come, or is to be received, since startDeferred() was called last
  std::vector<void*> toRelease_;
  bool hasFinished_ = false;
};

} // namespace torch_ucx_rpc
