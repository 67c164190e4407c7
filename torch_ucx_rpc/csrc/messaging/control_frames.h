#pragma once

#include "base/bytes.h"
#include "base/error.h"
#include "peers/barrier.h"
#include "wire/header.h"
#include "wire/replay_window.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>

namespace torch_ucx_rpc {

// Control frames that handlers hear of. The other kinds have no body, and concern connections alone.
struct Goodbye {};
struct Leave {};
struct Acknowledge {};
struct BarrierArrive {
  uint64_t round = 0;
  Barrier::Arrivals arrivals;
};
struct BarrierRelease {
  uint64_t round = 0;
  Barrier::Result result;
};
struct Refused {
  uint64_t callId = 0;
  Error why; // the receiver distinguishes only the codes of wire::RefusalReason
};
struct Taken {
  uint64_t bytes = 0;
};
struct PutRefused {
  std::string group;
  uint64_t epoch = 0; // that the receiver is in
};
using ControlFrame =
    std::variant<Goodbye, Leave, Acknowledge, BarrierArrive, BarrierRelease, Refused, Taken, PutRefused>;

// A control frame on the wire. wire/header.h has its bodies.
struct EncodedControl {
  wire::Kind kind;
  uint64_t callId;
  Bytes body;
};
EncodedControl encodeControl(const ControlFrame& frame);

// Nothing for a frame of another kind, or for one that is too short. Such a frame is dropped: no worker waits for an
// answer to it.
std::optional<ControlFrame> decodeControl(const wire::Header& header, const Bytes& body);

// The body of kReceived.
struct ReceivedFrames {
  uint64_t next = 0;
  std::map<uint64_t, uint64_t> missing;
  bool mustSendAgain = false;
};
Bytes encodeReceived(const wire::ReplayWindow& received, bool mustSendAgain);
std::optional<ReceivedFrames> decodeReceived(std::span<const std::byte> body);

} // namespace torch_ucx_rpc
