#include "messaging/control_frames.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

using wire::Kind;
using wire::RefusalReason;

// All other codes become kOther, and all other reasons kInternal.
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

// Returns a body with the record and the sentence after it.
template <typename Record>
Bytes bodyOf(const Record& record, const std::string& sentence) {
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

// Workers with adjoining ranks often have the same value. So the arrivals of a whole job are a few runs.
Bytes bodyOf(const Barrier::Arrivals& arrivals) {
  std::vector<wire::BarrierRun> runs;
  const auto add = [&runs](Rank rank, int64_t value, bool isGone) {
    if (!runs.empty()) {
      wire::BarrierRun& last = runs.back();
      if (last.firstRank + last.workers == rank && last.value == value && (last.areGone != 0) == isGone) {
        ++last.workers;
        return;
      }
    }
    runs.push_back({rank, 1, isGone ? 1u : 0u, value});
  };
  for (const auto& [rank, value] : arrivals.values) {
    add(rank, value, false);
  }
  for (const Rank rank : arrivals.gone) {
    add(rank, 0, true);
  }
  return Bytes(std::as_bytes(std::span(runs)));
}

std::optional<Barrier::Arrivals> arrivalsOf(const Bytes& body) {
  Barrier::Arrivals arrivals;
  wire::BarrierRun run{};
  if (body.size() % sizeof(run) != 0) {
    return std::nullopt;
  }
  for (size_t offset = 0; offset < body.size(); offset += sizeof(run)) {
    std::memcpy(&run, body.data() + offset, sizeof(run));
    const int end = run.firstRank + run.workers;
    if (run.firstRank < 0 || end > std::numeric_limits<Rank>::max()) {
      return std::nullopt;
    }
    for (int rank = run.firstRank; rank < end; ++rank) {
      if (run.areGone != 0) {
        arrivals.gone.insert(static_cast<Rank>(rank));
      } else {
        arrivals.values.emplace(static_cast<Rank>(rank), run.value);
      }
    }
  }
  return arrivals;
}

} // namespace

ControlFrame barrierArrive(uint64_t round, const Barrier::Arrivals& arrivals) {
  return {Kind::kBarrierArrive, round, bodyOf(arrivals)};
}

ControlFrame barrierRelease(uint64_t round, const Barrier::Result& result) {
  const auto& [sum, lost] = result;
  return {Kind::kBarrierRelease, round, bodyOf(wire::BarrierRelease{sum, lost ? 1u : 0u, 0}, lost.message())};
}

ControlFrame refused(uint64_t callId, const Error& why) {
  return {Kind::kRefused, callId, bodyOf(wire::Refusal{reasonOf(why.code()), 0}, why.message())};
}

ControlFrame putRefused(std::string_view group, uint64_t epoch) {
  return {Kind::kPutRefused, epoch, Bytes(std::as_bytes(std::span(group)))};
}

ControlFrame goodbyeToLost() {
  return {Kind::kGoodbye, wire::kGoodbyeToLost};
}

void dispatchControl(const EventHandlers& handlers, Peer& from, const ControlFrame& frame) {
  const Bytes& body = frame.body;
  switch (frame.kind) {
    case Kind::kGoodbye:
      if (frame.callId == wire::kGoodbyeToLost) {
        handlers.peers->onFailure(from, {ErrorCode::kPeerFailed, "it has lost this worker, which was silent"});
      } else {
        handlers.peers->onGoodbye(from);
      }
      return;
    case Kind::kLeave:
      handlers.group->onLeave(from);
      return;
    case Kind::kAcknowledge:
      handlers.group->onAcknowledge(from);
      return;
    case Kind::kRefused:
      if (const auto refusal = recordOf<wire::Refusal>(body)) {
        handlers.answers->onRefused(from, frame.callId, {codeOf(refusal->reason), sentenceAfter<wire::Refusal>(body)});
      }
      return;
    case Kind::kBarrierArrive:
      if (const std::optional<Barrier::Arrivals> arrivals = arrivalsOf(body)) {
        handlers.group->onBarrierArrive(from, frame.callId, *arrivals);
      }
      return;
    case Kind::kBarrierRelease:
      if (const auto release = recordOf<wire::BarrierRelease>(body)) {
        Barrier::Result result{release->sum, {}};
        if (release->lost != 0) {
          result.lost = {ErrorCode::kPeerFailed, sentenceAfter<wire::BarrierRelease>(body)};
        }
        handlers.group->onBarrierRelease(from, frame.callId, result);
      }
      return;
    case Kind::kTaken:
      handlers.puts->onTaken(from, frame.callId);
      return;
    case Kind::kPutRefused:
      handlers.puts->onPutRefused(from, {reinterpret_cast<const char*>(body.data()), body.size()}, frame.callId);
      return;
    default:
      return;
  }
}

Bytes encodeReceived(const wire::ReplayWindow& received, bool mustSendAgain) {
  const std::map<uint64_t, uint64_t>& missing = received.missing();
  wire::Received record{received.next(), static_cast<uint32_t>(missing.size()), mustSendAgain ? 1u : 0u};
  if (missing.size() > wire::kMaxRuns) { // the later frames count as missing
    record.runs = wire::kMaxRuns;
    record.next = std::next(missing.begin(), wire::kMaxRuns)->first;
  }
  Bytes body(std::as_bytes(std::span(&record, 1)));
  auto run = missing.begin();
  for (uint32_t left = record.runs; left != 0; --left, ++run) {
    const uint64_t ends[] = {run->first, run->second};
    body.append(reinterpret_cast<const char*>(ends), sizeof(ends));
  }
  return body;
}

std::optional<ReceivedFrames> decodeReceived(std::span<const std::byte> body) {
  wire::Received record{};
  if (body.size() < sizeof(record)) {
    return std::nullopt;
  }
  std::memcpy(&record, body.data(), sizeof(record));
  constexpr size_t kRunBytes = 2 * sizeof(uint64_t);
  if (record.runs > wire::kMaxRuns || body.size() != sizeof(record) + record.runs * kRunBytes) {
    return std::nullopt;
  }
  std::map<uint64_t, uint64_t> missing;
  for (uint32_t index = 0; index < record.runs; ++index) {
    uint64_t ends[2];
    std::memcpy(ends, body.data() + sizeof(record) + index * kRunBytes, sizeof(ends));
    missing.emplace(ends[0], ends[1]);
  }
  return ReceivedFrames{{record.next, std::move(missing)}, record.mustSendAgain != 0};
}

} // namespace torch_ucx_rpc
