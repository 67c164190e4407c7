#include "messaging/message.h"

#include "wire/body.h"

#include <algorithm>
#include <string>

namespace torch_ucx_rpc {

namespace {

std::span<const std::byte> bytesOf(const OutgoingMessage::Span& span) {
  return span.bytes;
}
std::span<const std::byte> bytesOf(const IncomingMessage::Span& span) {
  if (!span.data.device().is_cpu()) {
    return {}; // a tensor names this span as well, so readBody() refuses the body later
  }
  return {static_cast<const std::byte*>(span.data.get()), span.bytes};
}

// The payload if it is a span, else nothing. A body may name a span that does not exist. readBody() refuses it later.
template <typename Spans>
std::span<const std::byte> payloadIn(const Spans& spans, std::span<const std::byte> body) {
  const uint32_t index = spans.empty() ? wire::kNowhere : wire::payloadSpanOf(body);
  return index < spans.size() ? bytesOf(spans[index]) : std::span<const std::byte>();
}

} // namespace

void OutgoingMessage::address(
    wire::Kind kind, uint64_t sourceSession, Rank sourceRank, uint64_t targetSession, uint64_t callId) {
  header.kind = kind;
  header.sourceRank = static_cast<uint16_t>(sourceRank);
  header.sourceSession = sourceSession;
  header.targetSession = targetSession;
  header.callId = callId;
  header.spanCount = static_cast<uint32_t>(spans.size());
  for (size_t index = 0; index < spans.size(); ++index) {
    const Span& span = spans[index];
    Piece piece{header, span.bytes, span.from.is_cpu() ? Memory::kHost : Memory::kDevice};
    piece.header.index = static_cast<uint32_t>(index);
    piece.header.place = {0, span.bytes.size()};
    const size_t usual = piece.memory == Memory::kHost ? kPieceBytes : kDevicePieceBytes;
    // A multiple of the usual size, such that at most kMaxPieces pieces result.
    const size_t most = usual * (1 + (std::max<size_t>(piece.bytes.size(), 1) - 1) / (usual * kMaxPieces));
    while (piece.bytes.size() > most) {
      pieces.push_back(piece);
      pieces.back().bytes = piece.bytes.first(most);
      piece.bytes = piece.bytes.subspan(most);
      piece.header.place.offset += most;
    }
    pieces.push_back(piece);
  }
}

void OutgoingMessage::sealContent() {
  const std::span<const std::byte> rendezvousBody = isBodyEager() ? std::span<const std::byte>() : body;
  const std::span<const std::byte> payload = payloadIn(spans, body);
  if (const std::string& key = to->member().sendKey; !key.empty() && (!rendezvousBody.empty() || !payload.empty())) {
    wire::sealContent(key, header, rendezvousBody, payload);
  }
}

void OutgoingMessage::sealFrames(std::optional<wire::FrameSeal>& sealer) {
  // A member that is asked for admission does not have this worker's own key yet. All joins to it share one key.
  if (header.kind == wire::Kind::kJoin && !to->member().joinKey.empty()) {
    wire::FrameSeal(to->member().joinKey).sealFrame(header, body.size(), body);
  } else if (sealer.has_value()) {
    for (Piece& piece : pieces) {
      sealer->sealFrame(piece.header, piece.bytes.size(), {});
    }
    sealer->sealFrame(header, body.size(), isBodyEager() ? body : std::span<const std::byte>());
  }
}

uint64_t OutgoingMessage::totalBytes() const {
  uint64_t total = body.size();
  for (const Span& span : spans) {
    total += span.bytes.size();
  }
  return total;
}

uint64_t IncomingMessage::totalBytes() const {
  uint64_t total = body().size();
  for (const Span& span : spans) {
    total += span.bytes;
  }
  return total;
}

Error outOfMemoryFor(uint64_t bytes) {
  return {ErrorCode::kOutOfMemory, "out of memory for a message of " + std::to_string(bytes) + " bytes"};
}

Error callGivenUp() {
  return {ErrorCode::kCanceled, "its call was given up"};
}

bool IncomingMessage::isContentGenuine() const {
  const std::span<const std::byte> rendezvousBody = pooledBody ? body() : std::span<const std::byte>();
  const std::span<const std::byte> payload = payloadIn(spans, body());
  const std::string& key = from->member().receiveKey;
  return key.empty() || (rendezvousBody.empty() && payload.empty()) ||
      wire::isContentGenuine(key, header, rendezvousBody, payload);
}

} // namespace torch_ucx_rpc
