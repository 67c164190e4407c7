#pragma once

#include "base/bytes.h"
#include "base/error.h"
#include "messaging/event_handlers.h"
#include "peers/barrier.h"
#include "peers/peer.h"
#include "wire/header.h"
#include "wire/replay_window.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace torch_ucx_rpc {

// A control frame without the other fields of its header. wire/header.h says what each kind has.
struct ControlFrame {
  wire::Kind kind{};
  uint64_t callId = 0;
  Bytes body = {};
};

// The frames with a body.
ControlFrame barrierArrive(uint64_t round, const Barrier::Arrivals& arrivals);
ControlFrame barrierRelease(uint64_t round, const Barrier::Result& result);
// The receiver distinguishes only the codes of wire::RefusalReason.
ControlFrame refused(uint64_t callId, const Error& why);
ControlFrame putRefused(std::string_view group, uint64_t epoch);
// A goodbye to a worker that this one has lost. This worker goes on, so the other worker must treat it as lost, not as
// having left.
ControlFrame goodbyeToLost();

// Hands a frame to its handler. Drops a malformed frame, which no worker of this package sends, and a frame whose kind
// has no handler.
void dispatchControl(const EventHandlers& handlers, Peer& from, const ControlFrame& frame);

// The body of kReceived.
struct ReceivedFrames {
  wire::ReplayWindow frames;
  bool mustSendAgain = false;
};
Bytes encodeReceived(const wire::ReplayWindow& received, bool mustSendAgain);
std::optional<ReceivedFrames> decodeReceived(std::span<const std::byte> body);

} // namespace torch_ucx_rpc
