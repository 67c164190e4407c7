#pragma once

#include "base/bytes.h"
#include "base/trace.h"
#include "memory/device_streams.h"
#include "messaging/receive_window.h"
#include "peers/peer.h"
#include "wire/header.h"

#include <c10/core/Allocator.h>

#include <memory>
#include <span>
#include <vector>

namespace torch_ucx_rpc {

// Keeps memory alive while it is lent to the transport. Destroyed without the worker lock, since releasing a
// tensor may run anything, Python included.
class Lender {
 public:
  virtual ~Lender() = default;
  // Whether destroying it may take the GIL.
  virtual bool mayRunUserCode() const = 0;
};

// A message on its way out.
struct OutgoingMessage {
  // A body up to this size travels eagerly. Beyond it the receiver would pay for UCX's own reassembly buffer and
  // another copy, and the bytes would escape the receive window.
  static constexpr size_t kEagerBodyBytes = 256 * 1024;

  // What is sent of a span at a time. What else is to be sent gets in between, and each that has arrived is a sign of
  // life; yet large enough that its announcement is nothing beside it. A device's memory moves faster, and is to be set
  // up for each.
  static constexpr size_t kPieceBytes = 4 * 1024 * 1024;
  static constexpr size_t kDevicePieceBytes = 64 * 1024 * 1024;
  // Of a span, where those would be more: each costs the receiver memory of UCX's.
  static constexpr size_t kMaxPieces = 256;

  struct Span {
    std::span<const std::byte> bytes;
    c10::Device from = c10::kCPU; // where they lie
    c10::Device to = c10::kCPU; // where they are to arrive
  };
  struct Piece {
    wire::Header header;
    std::span<const std::byte> bytes;
    Memory memory;
  };

  // Writes the addressing into the headers of the body and of the pieces, which it makes.
  void address(wire::Kind kind, uint64_t sourceSession, Rank sourceRank, uint64_t targetSession, uint64_t callId);

  // In a job with a secret, when it is addressed. The first may take long for a large payload, and is for any thread;
  // the second is for the worker lock, right before it is sent.
  void sealContent();
  void sealFrames();

  bool isBodyEager() const {
    return !waitsForRoom && body.size() <= kEagerBodyBytes;
  }
  // What waits at the sender until the receiver fetches it.
  size_t rendezvousParts() const {
    return spans.size() + (isBodyEager() ? 0 : 1);
  }
  uint64_t totalBytes() const;

  wire::Header header; // of the body
  Bytes body;
  bool waitsForRoom = false; // also with a small body: until the receiver fetches it
  std::vector<Span> spans;
  std::vector<Piece> pieces; // of the spans
  uint64_t stagedBytes = 0; // of the spans, copied to the host since the transport could not share a device's memory
  std::unique_ptr<Lender> lender; // owns what `spans` point to
  DeviceWork pendingWork; // what makes the tensors: they are sent when it is done

  Peer* to = nullptr;

  // While it is under way, guarded by the worker lock:
  size_t unfinished = 0; // active messages that the transport has not completed
  Error error; // the first one
};

// A message that has arrived whole, in memory.
struct IncomingMessage {
  struct Span {
    c10::DataPtr data;
    uint64_t bytes = 0;
  };

  // A request is its sender's call, an answer its receiver's.
  trace::CallId call() const {
    return {header.kind == wire::Kind::kRequest ? header.sourceSession : header.targetSession, header.callId};
  }

  std::span<const std::byte> body() const {
    return pooledBody ? std::span(static_cast<const std::byte*>(pooledBody.get()), pooledBodyBytes) : eagerBody;
  }
  uint64_t totalBytes() const;

  // Whether what came by rendezvous and is to be decoded is what the sender has sealed; true in a job without a secret.
  // What came eagerly has been checked on arrival.
  bool isContentGenuine() const;

  Peer* from = nullptr;
  wire::Header header;
  Bytes eagerBody;
  c10::DataPtr pooledBody; // instead of eagerBody where the body came by rendezvous
  uint64_t pooledBodyBytes = 0;
  std::vector<Span> spans;
  DeviceWork pendingWork; // what puts the spans there; nothing for what the transport has received
  Admission admission; // its share of the receive window, given back when the handler returns
};

// Why a message of so many bytes is not received.
Error outOfMemoryFor(uint64_t bytes);
// Why one is neither sent nor received any further.
Error callGivenUp();

} // namespace torch_ucx_rpc
