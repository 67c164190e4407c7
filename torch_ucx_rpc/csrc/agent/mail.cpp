#include "agent/mail.h"

namespace torch_ucx_rpc {

void OutgoingMessage::address(
    wire::Kind kind, uint64_t sourceSession, worker_id_t sourceRank, uint64_t targetSession, uint64_t callId) {
  header.kind = kind;
  header.sourceRank = static_cast<uint32_t>(sourceRank);
  header.sourceSession = sourceSession;
  header.targetSession = targetSession;
  header.callId = callId;
  header.spanCount = static_cast<uint32_t>(spans.size());
  for (size_t index = 0; index < spans.size(); ++index) {
    spans[index].header = header;
    spans[index].header.index = static_cast<uint32_t>(index);
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

} // namespace torch_ucx_rpc
