#pragma once

#include "memory/host_pool.h"
#include "messaging/event_buffer.h"
#include "messaging/event_handlers.h"
#include "messaging/message.h"
#include "messaging/outbox.h"
#include "messaging/receive_window.h"
#include "messaging/receiver.h"
#include "peers/directory.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <atomic>
#include <bitset>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Takes in whole messages: checks who sent, joins body and spans, and admits what came by rendezvous into the receive
// window, to be received into memory by the Receiver. Everything here runs under the worker lock, unless it says
// otherwise.
class Inbox final : public TransportListener {
 public:
  Inbox(
      Transport& transport,
      const Directory& directory,
      const Outbox& outbox,
      std::shared_ptr<ReceiveWindow> window,
      HostPool& pool,
      uint64_t session,
      const EventHandlers& handlers,
      const DevicesInUse& devices,
      EventBuffer& events)
      : directory_(directory),
        outbox_(outbox),
        window_(std::move(window)),
        pool_(pool),
        session_(session),
        events_(events),
        receiver_(transport, window_, pool, handlers, devices, events) {}

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override;
  void onRendezvous(std::span<const std::byte> header, void* rendezvous, uint64_t bytes) override;
  void onEndpointFailed(EndpointId endpoint, const Error& error) override;

  // Starts receives and releases. Not inside a transport callback.
  void startDeferred();

  // Whether startDeferred() has more to do already: a receive may be done at once, and other operations are to run in
  // between.
  bool hasDeferred() const {
    return receiver_.hasDeferred() || (receiver_.hasFinished() && window_->waitingMessages.load() != 0);
  }

  // Whether there is memory of a device that is not free yet for what is to be received. Nothing announces that it is.
  bool waitsForDevice() const {
    return receiver_.waitsForDevice();
  }

  // Admits the message that has waited longest, whether it fits or not. For when the window has not moved for a while
  // although no request waits for a thread: then handlers wait for one another, and more memory is the only way on.
  void admitStalled();

  // From now on processes that are no members may ask to become one; with a key, those whose frames are sealed with it.
  void acceptJoins(const std::string& joinKey);

  // Who has asked for a sign of life since the last call.
  std::vector<Peer*> takePings() {
    return std::exchange(pings_, {});
  }

  // Gives up what has not been asked for; the transport is about to be closed.
  void close() {
    receiver_.close();
  }

  // Forgets the parts that have come of an answer that nobody waits for.
  void dropAnswer(const Peer& from, uint64_t callId);

  // Forgets what has not yet been received from a peer that is gone. What comes of it later is dropped too.
  void dropPeer(const Peer& peer);

  // Frames from strangers, from other jobs, forged, replayed, or malformed; the first of each sort is also told in
  // EventBuffer::addWarning(). Any thread.
  uint64_t refusedFrames() const {
    return refusedFrames_.load(std::memory_order_relaxed);
  }

  // For a message whose content turns out to be forged when it is there. Any thread.
  void countRefused() {
    refusedFrames_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  enum class FrameFault : uint8_t { kMalformed, kStaleSession, kStranger, kForged, kReplayed };

  // Whether the header is in order and meant for this worker.
  bool checkHeader(std::span<const std::byte> bytes, wire::Header& header);
  // The worker of this job that has sent it, for the first time; null where there is none. `data` is what travels in
  // the frame.
  Peer* findSender(const wire::Header& header, uint64_t dataBytes, std::span<const std::byte> data);
  void onJoin(const wire::Header& header, std::span<const std::byte> record);
  void rejectFrame(FrameFault fault, const std::string& what);
  void add(Peer& from, const wire::Header& header, wire::Piece piece);
  // Requests and answers, which may come in several parts.
  void assemble(Peer& from, const wire::Header& header, wire::Piece piece);
  void onAssembled(Peer& from, wire::Assembled assembled);
  void onCancel(const Peer& from, uint64_t callId);

  std::deque<Receiver::Announced>& queueFor(wire::Kind kind) {
    return kind == wire::Kind::kResponse ? waitingResponses_ : waitingRequests_;
  }
  void admitWaiting(std::deque<Receiver::Announced>& queue);
  void updateWaitingCount();

  const Directory& directory_;
  const Outbox& outbox_;
  const std::shared_ptr<ReceiveWindow> window_;
  HostPool& pool_;
  const uint64_t session_;
  EventBuffer& events_;

  wire::Assembler assembler_;
  std::deque<Receiver::Announced> waitingRequests_;
  std::deque<Receiver::Announced> waitingResponses_;
  Receiver receiver_;

  std::vector<Peer*> pings_;
  bool acceptsJoins_ = false;
  std::optional<wire::Opener> joinOpener_;
  std::bitset<8> hasWarned_; // by FrameFault
  std::atomic<uint64_t> refusedFrames_{0};
};

} // namespace torch_ucx_rpc
