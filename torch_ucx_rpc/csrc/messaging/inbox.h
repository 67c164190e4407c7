#pragma once

#include "memory/host_pool.h"
#include "messaging/connection.h"
#include "messaging/event_buffer.h"
#include "messaging/event_handlers.h"
#include "messaging/message.h"
#include "messaging/receive_window.h"
#include "messaging/receiver.h"
#include "peers/directory.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <atomic>
#include <bitset>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Receives messages. It checks who sent each frame, and joins the body and the spans of a message. If parts come by
// rendezvous, the receive window must admit a request or an answer, and PutHandler decides about a put. The Receiver
// then receives the parts into memory. All functions need the worker lock, unless they say otherwise.
class Inbox final : public TransportListener, private ReceivingParts {
 public:
  Inbox(const ReceivingParts& parts, const Directory& directory, uint64_t session)
      : ReceivingParts(parts), directory_(directory), session_(session), receiver_(parts) {}

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override;
  void onRendezvous(std::span<const std::byte> header, void* rendezvous, uint64_t bytes) override;
  void onEndpointFailed(EndpointId endpoint, const Error& error) override;

  // Admits messages as the window allows. Call it at the start of a round, never inside a transport callback.
  void admitWaiting();
  Receiver& receiver() {
    return receiver_;
  }

  // Whether a message that was received since the round began may have made room for a waiting one. Another round must
  // then follow.
  bool hasMadeRoom() const {
    return receiver_.hasFinished() && window_->waitingMessages.load() != 0;
  }

  ReceiveWindow& window() const {
    return *window_;
  }

  // Admits the request that has waited longest, whether it fits or not. Call it when the window has not moved for a
  // while although no request waits for a thread. Handlers then wait for one another, and only more memory lets them
  // continue.
  void admitStalled();

  // From now on, processes that are not members may ask to become one. If `joinKey` is not empty, their frames must be
  // sealed with it.
  void acceptJoins(const std::string& joinKey);

  // Receive or drop a value that onPutAnnounced() has held back. If the value is no longer there, receivePut() rejects
  // it.
  void receivePut(Peer& from, uint64_t number, std::vector<c10::DataPtr> into);
  void dropPut(Peer& from, uint64_t number);

  // Drops the parts of an incomplete answer for which no caller waits.
  void dropAnswer(const Peer& from, uint64_t callId);

  // Drops everything that has not been received from a peer that is gone. Inbox drops the peer's later frames as they
  // come.
  void dropPeer(const Peer& peer);

  // The number of frames that were refused: from strangers or other jobs, forged, replayed, or malformed. The first of
  // each kind also causes a warning. Any thread.
  uint64_t refusedFrames() const {
    return refusedFrames_.load(std::memory_order_relaxed);
  }

  // Counts a message whose content turned out to be forged after it had arrived. Any thread.
  void countRefused() {
    refusedFrames_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  // Notes the number of a frame, and the frames that it acknowledges. Returns false if the frame has come before, or is
  // an announcement over an earlier endpoint, which is void.
  bool takeNumber(Connection& from, const wire::Header& header, uint64_t bytes, bool isRendezvous);
  // Notes a rendezvous. Returns null if the peer has announced it before.
  Announcement* announce(Connection& from, const wire::Header& header, void* rendezvous);
  void onReceived(Connection& from, std::span<const std::byte> body);

  enum class FrameFault : uint8_t { kMalformed, kStaleSession, kStranger, kForged, kReplayed };

  // Reads a header. If it is malformed or meant for another worker, refuses the frame and returns false.
  bool checkHeader(std::span<const std::byte> bytes, wire::Header& header);
  // The connection to the worker that has sent the frame. Null for a frame of a stranger, or a forged one. `data` is
  // the body if it travels in the frame.
  Connection* findSender(const wire::Header& header, uint64_t dataBytes, std::span<const std::byte> data);
  void onJoin(const wire::Header& header, std::span<const std::byte> record);
  void rejectFrame(FrameFault fault, const std::string& what);
  void add(Connection& from, const wire::Header& header, wire::Piece piece);
  // Adds a part of a request or of an answer.
  void assemble(Connection& from, const wire::Header& header, wire::Piece piece);
  void onAssembled(Connection& from, wire::Assembled assembled);
  void onPutAnnounced(Connection& from, wire::Assembled assembled, uint64_t bytes);
  void onCancel(Connection& from, uint64_t callId);

  std::deque<Receiver::Announced>& queueFor(wire::Kind kind) {
    return kind == wire::Kind::kResponse ? waitingResponses_ : waitingRequests_;
  }
  void admitWaiting(std::deque<Receiver::Announced>& queue);
  void updateWaitingCount();

  const Directory& directory_;
  const uint64_t session_;

  wire::Assembler assembler_;
  std::deque<Receiver::Announced> waitingRequests_;
  std::deque<Receiver::Announced> waitingResponses_;
  std::deque<Receiver::Announced> waitingPuts_;
  std::map<std::pair<const Peer*, uint64_t>, Receiver::Announced> heldPuts_;
  Receiver receiver_;

  bool acceptsJoins_ = false;
  std::optional<wire::FrameSeal> joinOpener_;
  std::bitset<8> hasWarned_; // by FrameFault
  std::atomic<uint64_t> refusedFrames_{0};
};

} // namespace torch_ucx_rpc
