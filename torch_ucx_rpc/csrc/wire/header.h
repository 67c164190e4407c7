#pragma once

#include "base/error.h"
#include "base/hmac.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

// The header that leads every active message. docs/development/wire_format.md draws it and the bodies.
//
//      0       2   3   4               8                              16
//      +-------+---+---+---------------+-------------------------------+
//   0  | magic |ver|knd| rank  |endpnt |        source session         |
//      +-------+---+---+---------------+-------------------------------+
//  16  |        target session         |            call id            |
//      +---------------+---------------+-------------------------------+
//  32  |     index     |  span count   |           sequence            |
//      +---------------+---------------+-------------------------------+
//  48  |       content tag; of a span: offset and span bytes           |
//      +---------------+---------------+-------------------------------+
//  64  |  deadline ms  | acknowledged  |           frame tag           |
//      +---------------+---------------+                               +
//  80  |                               |
//      +-------------------------------+
//
// Little endian. A message is one body (index = kBodyIndex) and `span count` spans (index 0, 1, ...). The body is one
// active message, and so is each piece of a span. Each has this header. They may arrive in any order, and (source
// session, kind, call id) joins them. wire/seal.h fills the tags, which are zero in a job without a secret.

namespace torch_ucx_rpc::wire {

static_assert(
    std::endian::native == std::endian::little, "the wire format is the memory layout of a little-endian host");

enum class Kind : uint8_t {
  kRequest = 1,
  kResponse = 2,
  kCancel = 3, // the sender no longer waits for `call id`; no body
  kGoodbye = 4, // the sender shuts down, or has lost the receiver (kGoodbyeToLost); no body
  kBarrierArrive = 5, // body: BarrierRuns; `call id` is the round
  kBarrierRelease = 6, // body: BarrierRelease and a sentence; `call id` is the round
  // In groups that workers join and leave:
  // The sender, unknown so far, wants to be a member; body: its record (torch_ucx_rpc/_bootstrap/dynamic_group.py).
  kJoin = 7,
  kLeave = 8, // the sender takes no more calls, answers open ones, and then says goodbye; no body
  kAcknowledge = 9, // the sender has noted the receiver's kJoin or kLeave; no body
  // For peers that fall silent (messaging/heartbeat.h):
  kPing = 10, // asks for a kPong; no body
  kPong = 11, // no body
  // The request with this call id has not been run, or its answer cannot be sent; body: Refusal and a sentence.
  kRefused = 12,
  kUseNetwork = 13, // the sender gets nothing from the receiver over shared memory; no body
  kReceived = 14, // body: Received and runs of missing numbers; like kJoin, it never has a number
  // For channels (rpc/channel.h):
  kPut = 15, // a value for a tag of the receiver; body: wire/put.h; `call id` is the sender's number of the put
  // The sender has taken or dropped puts of the receiver; `call id`: their bytes (rpc/channel_parts.h); no body.
  kTaken = 16,
  kPutRefused = 17, // a put was dropped: the sender is in a later epoch of its group, `call id`; body: the group
};

// The call id of a goodbye whose sender keeps running.
inline constexpr uint64_t kGoodbyeToLost = 1;

// Whether frames of this kind are parts of a message, which may have spans. The others are control frames.
inline constexpr bool isMessage(Kind kind) {
  return kind == Kind::kRequest || kind == Kind::kResponse || kind == Kind::kPut;
}

inline constexpr uint16_t kMagic = 0x5855; // "UX"
// Increase it with every change that an older reader would misread. Workers of one job must agree on it. Version 5
// added numbers and acknowledgements of frames, channels, and the tree of the barrier.
inline constexpr uint8_t kVersion = 5;
inline constexpr uint32_t kBodyIndex = 0xFFFFFFFF;
// Far more than any real message has: only tensors on devices have spans of their own whatever their size
// (tensors/storage_plan.h). Small enough that a false count costs nothing.
inline constexpr uint32_t kMaxSpans = 1u << 20;

// Where in its span a piece belongs.
struct Place {
  uint64_t offset;
  uint64_t spanBytes;
};

struct Header {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  Kind kind = Kind::kRequest;
  uint16_t sourceRank = 0;
  // Counts the sender's endpoints to the receiver, from 1. Announcements over earlier endpoints are void. 0: the frame
  // is never sent again.
  uint16_t endpoint = 0;
  uint64_t sourceSession = 0; // random, one for each life of an agent: receivers recognize frames of an earlier life
  uint64_t targetSession = 0; // random too: a frame for an earlier owner of this address is refused
  uint64_t callId = 0;
  uint32_t index = kBodyIndex;
  uint32_t spanCount = 0;
  // The number of the frame. The sender counts from 1, for each receiver. A frame that is sent again has the same
  // number. 0: the frame has no number, and is never sent again.
  uint64_t sequence = 0;
  union {
    Hmac::Tag contentTag{}; // of a body: over the payload and the body, where they travel outside of this frame
    Place place; // of a piece of a span
  };
  // With a request's body: the milliseconds for which its caller waits, counted from the call. 0: there is no limit, or
  // the request must run even if its caller has given up. The time is relative, because the clocks of two machines may
  // differ. So the time on the way does not count.
  uint32_t deadlineMs = 0;
  // The number of the first frame that this frame's sender has not received from the other worker. Only the low half of
  // the number travels.
  uint32_t acknowledged = 0;
  Hmac::Tag frameTag{}; // over this header, and over a body that travels in this frame
};
static_assert(sizeof(Header) == 88 && offsetof(Header, sourceRank) == 4 && offsetof(Header, endpoint) == 6);
static_assert(offsetof(Header, sourceSession) == 8 && offsetof(Header, targetSession) == 16);
static_assert(offsetof(Header, callId) == 24 && offsetof(Header, index) == 32 && offsetof(Header, spanCount) == 36);
static_assert(
    offsetof(Header, sequence) == 40 && offsetof(Header, contentTag) == 48 && offsetof(Header, deadlineMs) == 64);
static_assert(offsetof(Header, acknowledged) == 68 && offsetof(Header, frameTag) == 72);

// Bodies of the two barrier frames (peers/barrier.h). An arrival has any number of runs, each of adjoining ranks.
struct BarrierRun {
  int16_t firstRank;
  uint16_t workers;
  uint32_t areGone; // 1: they left or failed before they arrived
  int64_t value; // of each of these workers; the release has the sum over those that are present then
};
struct BarrierRelease {
  int64_t sum;
  uint32_t lost; // 1: workers have died, and the rest of the body says which
  uint32_t reserved;
};

// Body of kRefused, followed by the sentence that says why.
enum class RefusalReason : uint32_t {
  kOther = 0,
  kMalformed = 1, // or its content does not match its seal
  kNoMemory = 2,
  kNoThread = 3,
};
struct Refusal {
  RefusalReason reason;
  uint32_t reserved;
};

// Body of kReceived: which frames the sender has received from the other worker. All below `next` have come, except
// runs of missing numbers. The runs follow this struct, as two numbers each: the first number of the run, and the first
// number after it.
struct Received {
  uint64_t next;
  uint32_t runs;
  uint32_t mustSendAgain; // 1: the sender waits for missing frames, and asks for them
};
inline constexpr uint32_t kMaxRuns = 1024;

// Reads a header and checks everything that can be checked without knowing the job: magic, version, size, kind, span
// count, index, and where a piece begins.
Error readHeader(std::span<const std::byte> bytes, Header& header);

} // namespace torch_ucx_rpc::wire
