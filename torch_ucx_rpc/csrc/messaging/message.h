#pragma once

#include "base/bytes.h"
#include "base/trace.h"
#include "memory/device_streams.h"
#include "messaging/receive_window.h"
#include "peers/peer.h"
#include "transport/transport.h"
#include "wire/header.h"
#include "wire/seal.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace torch_ucx_rpc {

// Keeps memory alive while the transport uses it. Destroy a lender without the worker lock: releasing a tensor may run
// any code, Python included.
class Lender {
 public:
  virtual ~Lender() = default;
  // Whether destroying the lender may take the GIL.
  virtual bool mayRunUserCode() const = 0;
};

struct OutgoingLoad; // connection.h

// A message on its way out.
struct OutgoingMessage {
  // A body up to this size travels eagerly. A larger one would cost the receiver UCX's own reassembly buffer and
  // another copy, and would bypass the receive window.
  static constexpr size_t kEagerBodyBytes = 256 * 1024;

  // Spans travel in pieces of this size. Other messages can travel between two pieces, and each piece that arrives is a
  // sign of life. The announcement of a piece costs little beside its bytes. Device memory moves faster, and each
  // transfer of it needs a setup. So its pieces are larger.
  static constexpr size_t kPieceBytes = 4 * 1024 * 1024;
  static constexpr size_t kDevicePieceBytes = 64 * 1024 * 1024;
  // A span has at most this many pieces. The pieces of larger spans are larger, since UCX takes memory at the receiver
  // for each announced piece.
  static constexpr size_t kMaxPieces = 256;

  struct Span {
    std::span<const std::byte> bytes;
    c10::Device from = c10::kCPU; // where the bytes are
    c10::Device to = c10::kCPU; // where they are to arrive, as the sender wishes
  };
  struct Piece {
    wire::Header header;
    std::span<const std::byte> bytes;
    Memory memory;
    bool hasArrived = false; // see hasArrived()
  };

  // Fills in the header of the body. Cuts the spans into pieces, each with a header.
  void address(wire::Kind kind, uint64_t sourceSession, Rank sourceRank, uint64_t targetSession, uint64_t callId);

  // Seal an addressed message in a job with a secret. Without a secret they do nothing. sealContent() may take long for
  // a large payload, and any thread may call it. sealFrames() needs the worker lock, and the numbers of the frames.
  void sealContent();
  void sealFrames(std::optional<wire::FrameSeal>& sealer);

  bool isBodyEager() const {
    return !waitsForRoom && body.size() <= kEagerBodyBytes;
  }
  // The number of parts (spans, and a large body) that wait here until the receiver fetches them.
  size_t rendezvousParts() const {
    return spans.size() + (isBodyEager() ? 0 : 1);
  }
  uint64_t totalBytes() const;

  // Visits the frames in the order of their numbers, if they have any: see KeptMessages.
  template <typename Visit>
  void forEachFrame(Visit visit) {
    for (Piece& piece : pieces) {
      visit(piece.header, piece.hasArrived);
    }
    visit(header, hasBodyArrived);
  }
  uint64_t firstNumber() const {
    return pieces.empty() ? header.sequence : pieces.front().header.sequence;
  }
  // Whether the peer has acknowledged all frames.
  bool hasArrived() const {
    return hasBodyArrived && std::ranges::all_of(pieces, &Piece::hasArrived);
  }

  wire::Header header; // of the body
  Bytes body;
  bool waitsForRoom = false; // a small body goes by rendezvous too, and waits until the receiver has room
  std::vector<Span> spans;
  std::vector<Piece> pieces; // of the spans
  uint64_t stagedBytes = 0; // bytes of spans that were copied to the host, since the transport cannot share them
  std::unique_ptr<Lender> lender; // owns what `spans` point to
  DeviceWork pendingWork; // the work of devices that computes the tensors; the message leaves after it

  Peer* to = nullptr;

  // The worker lock guards the following members while the message is under way. Wait says why Outbox holds the
  // message: the peer has not admitted this worker, a device still computes, or the message waits for retryStranded().
  enum class Wait : uint8_t { kNothing, kAdmission, kDevice, kRetry } waitsFor = Wait::kNothing;
  size_t unfinished = 0; // active messages that the transport has not completed
  bool hasLeftInPart = false; // one of several active messages has been given to the transport
  Error error; // the first error
  bool hasBodyArrived = false; // see hasArrived()
  bool isKept = false; // KeptMessages keeps it until the peer has it
  OutgoingLoad* takesRoomOf = nullptr;
  bool isUnderWay = false; // counted in Outgoing::underWay
};

// A message that has arrived whole, in memory.
struct IncomingMessage {
  struct Span {
    c10::DataPtr data;
    uint64_t bytes = 0;
    bool isBesidePool = false; // in device memory outside the pool, from which the decoder copies
  };

  // The call that the message belongs to. Its caller sends the request and receives the answer.
  trace::CallId call() const {
    return {header.kind != wire::Kind::kResponse ? header.sourceSession : header.targetSession, header.callId};
  }

  std::span<const std::byte> body() const {
    return pooledBody ? std::span(static_cast<const std::byte*>(pooledBody.get()), pooledBodyBytes) : eagerBody;
  }
  uint64_t totalBytes() const;

  // Whether the body and the payload that came by rendezvous are what the sender sealed. True in a job without a
  // secret. Inbox checks eager bodies on arrival.
  bool isContentGenuine() const;

  Peer* from = nullptr;
  wire::Header header;
  Bytes eagerBody;
  c10::DataPtr pooledBody; // in place of eagerBody if the body came by rendezvous
  uint64_t pooledBodyBytes = 0;
  std::vector<Span> spans;
  DeviceWork pendingWork; // of a message to oneself: the work of devices that copies its spans
  Admission admission; // the message's share of the receive window
};

// The error of a message of `bytes` that is refused for lack of memory.
Error outOfMemoryFor(uint64_t bytes);
// The error of a message whose caller has given up its call.
Error callGivenUp();

} // namespace torch_ucx_rpc
