#include "messaging/control_frames.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using wire::Kind;
using wire::RefusalReason;

// All others are kInternal, and kOther.
constexpr std::pair<ErrorCode, RefusalReason> kReasons[] = {
    {ErrorCode::kProtocol, RefusalReason::kMalformed},
    {ErrorCode::kOutOfMemory, RefusalReason::kNoMemory},
    {ErrorCode::kOutOfThreads, RefusalReason::kNoThread},
};

RefusalReason reasonOf(ErrorCode code) {
  const auto* known = std::ranges::find(kReasons, code, &std::pair<ErrorCode, RefusalReason>::first);
  return known != std::end(kReasons) ? known->second : RefusalReason::kOther;
}

ErrorCode codeOf(RefusalReason reason) {
  const auto* known = std::ranges::find(kReasons, reason, &std::pair<ErrorCode, RefusalReason>::second);
  return known != std::end(kReasons) ? known->first : ErrorCode::kInternal;
}

// A record, and a sentence after it.
template <typename Record>
Bytes bodyOf(const Record& record, const std::string& sentence = {}) {
  Bytes body(std::as_bytes(std::span(&record, 1)));
  body.append(sentence.data(), sentence.size());
  return body;
}

template <typename Record>
std::optional<Record> recordOf(const Bytes& body) {
  Record record{};
  if (body.size() < sizeof(record)) {
    return std::nullopt;
  }
  std::memcpy(&record, body.data(), sizeof(record));
  return record;
}

template <typename Record>
std::string sentenceAfter(const Bytes& body) {
  return {reinterpret_cast<const char*>(body.data()) + sizeof(Record), body.size() - sizeof(Record)};
}

struct Encoder {
  EncodedControl operator()(const Goodbye& /*frame*/) const {
    return {Kind::kGoodbye, 0, {}};
  }
  EncodedControl operator()(const Leave& /*frame*/) const {
    return {Kind::kLeave, 0, {}};
  }
  EncodedControl operator()(const Acknowledge& /*frame*/) const {
    return {Kind::kAcknowledge, 0, {}};
  }
  EncodedControl operator()(const BarrierArrive& frame) const {
    return {Kind::kBarrierArrive, frame.round, bodyOf(wire::BarrierArrive{frame.value})};
  }
  EncodedControl operator()(const BarrierRelease& frame) const {
    const auto& [sum, lost] = frame.result;
    return {Kind::kBarrierRelease, frame.round, bodyOf(wire::BarrierRelease{sum, lost ? 1u : 0u, 0}, lost.message())};
  }
  EncodedControl operator()(const Refused& frame) const {
    return {Kind::kRefused, frame.callId, bodyOf(wire::Refusal{reasonOf(frame.why.code()), 0}, frame.why.message())};
  }
};

} // namespace

EncodedControl encodeControl(const ControlFrame& frame) {
  return std::visit(Encoder(), frame);
}

std::optional<ControlFrame> decodeControl(const wire::Header& header, const Bytes& body) {
  switch (header.kind) {
    case Kind::kGoodbye:
      return Goodbye{};
    case Kind::kLeave:
      return Leave{};
    case Kind::kAcknowledge:
      return Acknowledge{};
    case Kind::kRefused:
      if (const auto refusal = recordOf<wire::Refusal>(body)) {
        return Refused{header.callId, {codeOf(refusal->reason), sentenceAfter<wire::Refusal>(body)}};
      }
      return std::nullopt;
    case Kind::kBarrierArrive:
      if (const auto arrive = recordOf<wire::BarrierArrive>(body); arrive && body.size() == sizeof(*arrive)) {
        return BarrierArrive{header.callId, arrive->value};
      }
      return std::nullopt;
    case Kind::kBarrierRelease:
      if (const auto release = recordOf<wire::BarrierRelease>(body)) {
        Barrier::Result result{release->sum, {}};
        if (release->lost != 0) {
          result.lost = {ErrorCode::kPeerFailed, sentenceAfter<wire::BarrierRelease>(body)};
        }
        return BarrierRelease{header.callId, std::move(result)};
      }
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

} // namespace torch_ucx_rpc
