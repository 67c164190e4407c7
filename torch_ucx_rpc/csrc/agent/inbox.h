#pragma once

#include "agent/device_streams.h"
#include "agent/directory.h"
#include "agent/mail.h"
#include "agent/outbox.h"
#include "agent/receive_window.h"
#include "memory/host_pool.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <algorithm>
#include <atomic>
#include <bitset>
#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Receives whole messages: checks who sent, joins body and spans, admits what came by rendezvous into the receive window,
// and has it received into pooled buffers, a few pieces of each peer's at a time: on a network they travel one after the other, and small
// messages and signs of life wait behind those that have been asked for. Everything here runs under the worker lock, unless it says
// otherwise.
class Inbox final : public TransportListener {
 public:
  // Whether the answer of a peer to a call is still awaited; asked under the worker lock.
  using IsAwaited = UniqueFunction<bool(const Peer& from, uint64_t callId)>;
  // The devices that tensors may arrive on, besides the CPU.
  using DevicesInUse = UniqueFunction<const Devices&()>;

  Inbox(
      Transport& transport,
      const Directory& directory,
      const Outbox& outbox,
      std::shared_ptr<ReceiveWindow> window,
      HostPool& pool,
      uint64_t session,
      IsAwaited isAwaited,
      DevicesInUse devices,
      Deliveries& deliveries)
      : transport_(transport),
        directory_(directory),
        outbox_(outbox),
        window_(std::move(window)),
        pool_(pool),
        session_(session),
        isAwaited_(std::move(isAwaited)),
        devices_(std::move(devices)),
        deliveries_(deliveries) {}

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override;
  void onParked(std::span<const std::byte> header, void* parked, uint64_t bytes) override;
  void onEndpointFailed(EndpointId endpoint, const Error& error) override;

  using Clock = std::chrono::steady_clock;

  // Bytes that are received at a time, of the window. Several messages in parallel arrive no sooner than one after the other, but
  // into more memory, which is cold. Enough to hide a network's latency: 25 GB/s times 160 us.
  static constexpr uint64_t kReceivingBytes = 4ull * 1024 * 1024;
  // What is not there after this does not count any more: it is the sender or the network that is slow.
  static constexpr auto kSlow = std::chrono::milliseconds(20);

  // Bytes that are asked of a peer at a time, and pieces where those are larger.
  static constexpr uint64_t kAskedBytes = 2 * OutgoingMessage::kPieceBytes;
  static constexpr size_t kAskedPieces = 2;

  // Starts receives and refusals. Not inside a transport callback.
  void settle();

  // Whether settle() has more to do already: what it starts may be done at once, and other operations are to run in between.
  bool isUnsettled() const {
    return !due_.empty() || (hasFinished_ && !(waitingRequests_.empty() && waitingResponses_.empty()));
  }

  // Whether there is memory of a device that is not free yet for what is to be received. Nothing announces that it is.
  bool waitsForDevice() const {
    return !starting_.empty();
  }

  // Admits the message that has waited longest, whether it fits or not. For when the window has not moved for a while although no request
  // waits for a thread: then handlers wait for one another, and more memory is the only way on.
  void admitStalled();

  // From now on processes that are no members may ask to become one; with a key, those whose frames are sealed with it.
  void acceptJoins(const std::string& joinKey);

  // Who has asked for a sign of life since the last call.
  std::vector<Peer*> takePings() {
    return std::exchange(pings_, {});
  }

  // Gives up what waits for a device; the transport is about to be closed.
  void close();

  // Forgets what has not yet been received from a peer that is gone. What comes of it later is dropped too.
  void dropPeer(const Peer& peer);

  // Frames from strangers, from other jobs, forged, replayed, or malformed; the first of each sort is also told in
  // Deliveries::warning. Any thread.
  uint64_t refusedFrames() const {
    return refusedFrames_.load(std::memory_order_relaxed);
  }

  // For a message whose content turns out to be forged when it is there. Any thread.
  void countRefused() {
    refusedFrames_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  // What is received at a time: a piece of a span, or the body.
  struct Part {
    void* parked;
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
    DeviceWork before; // until then
    std::vector<Part> parts; // from then on
    size_t begun = 0; // of those
    size_t unfinished = 0; // of those begun
    bool isDropped = false;
    Error error;
  };
  // What is received from a peer.
  struct Source {
    bool isDue = false; // in due_
    uint64_t askedBytes = 0;
    size_t askedPieces = 0;
    bool isOldestsTurn = true;
    std::vector<std::list<Receiving>::iterator> waiting; // those that have parts not begun, the oldest first

    // The oldest and the one that has the least left have every other turn: a small one passes a large one, and large ones do not
    // keep each other from being finished.
    std::vector<std::list<Receiving>::iterator>::iterator next() {
      return isOldestsTurn ? waiting.begin()
                           : std::min_element(waiting.begin(), waiting.end(), [](auto one, auto other) {
                               return one->parts.size() - one->begun < other->parts.size() - other->begun;
                             });
    }
  };

  enum class Refusal : uint8_t { kMalformed, kOtherLife, kStranger, kForged, kReplayed };

  // Whether the header is in order and meant for this worker.
  bool checkHeader(std::span<const std::byte> bytes, wire::Header& header);
  // The worker of this job that has sent it, for the first time; null where there is none. `data` is what travels in the frame.
  Peer* findSender(const wire::Header& header, uint64_t dataBytes, std::span<const std::byte> data);
  void onJoin(const wire::Header& header, std::span<const std::byte> record);
  void refuseFrame(Refusal refusal, const std::string& what);
  void add(Peer& from, const wire::Header& header, wire::Piece piece);
  void onAssembled(Peer& from, wire::Assembled assembled);
  void onCancel(const Peer& from, uint64_t callId);
  void refuse(wire::Piece& piece);
  void refuseAll(wire::Assembled& assembled);
  static bool isParked(const wire::Piece& piece);
  static bool hasParked(const wire::Assembled& assembled);
  static uint64_t parkedBytes(const wire::Assembled& assembled);

  struct Waiting {
    Peer* from;
    wire::Assembled assembled;
    uint64_t bytes;
  };
  std::deque<Waiting>& queueFor(wire::Kind kind) {
    return kind == wire::Kind::kResponse ? waitingResponses_ : waitingRequests_;
  }
  void admitWaiting(std::deque<Waiting>& queue);
  bool isBusyReceiving(uint64_t more) const;
  void start(Waiting waiting, Admission admission);
  // Memory for the spans, of devices where the body says so; of the host if the body itself is still to be received.
  void allocateSpans(Receiving& receiving);
  void allocateOnDevices(Receiving& receiving);
  // False, and nothing done, while its memory is not free.
  bool receiveIfFree(std::list<Receiving>::iterator receiving);
  // For what is not being received yet.
  void reject(std::list<Receiving>::iterator receiving, Error error);
  // Notes what is to be received; what came eagerly is copied.
  static void addPart(Receiving& receiving, const wire::Piece& piece, const c10::DataPtr& into);
  void setDue(Source& source);
  void askFor(Source& source);
  void receivePart(Source& source, std::list<Receiving>::iterator receiving);
  // Whether it has not been given up meanwhile, as far as is known here.
  bool isWanted(const IncomingMessage& message);
  // Gives up the parts that have not begun.
  void giveUpRest(std::list<Receiving>::iterator receiving, const Error& why);
  // If all its parts are through.
  void finishIfDone(std::list<Receiving>::iterator receiving);
  void forget(std::list<Receiving>::iterator receiving);
  void updateWaitingCount();

  Transport& transport_;
  const Directory& directory_;
  const Outbox& outbox_;
  const std::shared_ptr<ReceiveWindow> window_;
  HostPool& pool_;
  const uint64_t session_;
  IsAwaited isAwaited_;
  DevicesInUse devices_;
  Deliveries& deliveries_;

  wire::Assembler assembler_;
  std::vector<void*> toRefuse_;
  std::deque<Waiting> waitingRequests_;
  std::deque<Waiting> waitingResponses_;
  std::list<Receiving> receiving_;
  std::vector<std::list<Receiving>::iterator> starting_; // of those, the ones whose memory is not free yet
  ReceiveMemory deviceMemory_;
  std::list<Receiving> dropped_; // the transport still has their memory
  std::unordered_map<const Peer*, Source> sources_;
  std::vector<Source*> due_; // of which something has come, or is to be received, since settle() was called last
  bool hasFinished_ = false; // a message, since then

  std::vector<Peer*> pings_;
  bool acceptsJoins_ = false;
  std::optional<wire::Opener> joinOpener_;
  std::bitset<8> hasWarned_; // by Refusal
  std::atomic<uint64_t> refusedFrames_{0};
};

} // namespace torch_ucx_rpc
