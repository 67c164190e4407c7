#include "wire/assembler.h"

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc::wire {

void Assembler::take(Partial& partial, std::vector<Piece>& into) {
  if (partial.hasBody) {
    into.push_back(std::move(partial.body));
  }
  for (auto& [index, piece] : partial.spans) {
    into.push_back(std::move(piece));
  }
}

Assembler::Outcome Assembler::add(
    const Header& header, Piece piece, Assembled& assembled, std::vector<Piece>& rejected) {
  const bool isBody = header.index == kBodyIndex;
  const Key key{header.sourceSession, header.callId, header.kind};
  if (isBody && header.spanCount == 0 && (partial_.empty() || !partial_.contains(key))) {
    assembled = {header, std::move(piece), {}}; // most messages: nothing to join, nothing to remember
    return Outcome::kWhole;
  }

  auto [entry, isNew] = partial_.try_emplace(key);
  Partial& partial = entry->second;
  if (isNew) {
    partial.header = header;
  }
  if (partial.isGivenUp) {
    rejected.push_back(std::move(piece));
    if (--partial.missing == 0) {
      partial_.erase(entry);
    }
    return Outcome::kGivenUp;
  }
  const bool doubled = isBody ? partial.hasBody : partial.spans.contains(header.index);
  if (doubled || header.spanCount != partial.header.spanCount) {
    rejected.push_back(std::move(piece));
    giveUp(entry, rejected);
    return Outcome::kRejected;
  }
  if (isBody) {
    partial.hasBody = true;
    partial.header = header;
    partial.body = std::move(piece);
  } else {
    partial.spans.emplace(header.index, std::move(piece));
  }
  if (!partial.hasBody || partial.spans.size() != partial.header.spanCount) {
    return Outcome::kIncomplete;
  }

  assembled.header = partial.header;
  assembled.body = std::move(partial.body);
  assembled.spans.resize(partial.spans.size());
  for (auto& [index, span] : partial.spans) {
    assembled.spans[index] = std::move(span);
  }
  partial_.erase(entry);
  return Outcome::kWhole;
}

void Assembler::cancel(uint64_t session, Kind kind, uint64_t callId, std::vector<Piece>& dropped) {
  const auto entry = partial_.find(Key{session, callId, kind});
  if (entry != partial_.end() && !entry->second.isGivenUp) {
    giveUp(entry, dropped);
  }
}

void Assembler::giveUp(Partials::iterator entry, std::vector<Piece>& dropped) {
  Partial& partial = entry->second;
  const uint64_t arrived = partial.spans.size() + (partial.hasBody ? 1 : 0);
  take(partial, dropped);
  partial.spans.clear();
  partial.hasBody = false;
  partial.isGivenUp = true;
  partial.missing = partial.header.spanCount + 1ull - arrived;
}

size_t Assembler::incomplete() const {
  return static_cast<size_t>(
      std::count_if(partial_.begin(), partial_.end(), [](const auto& entry) { return !entry.second.isGivenUp; }));
}

void Assembler::dropSession(uint64_t session, std::vector<Piece>& dropped) {
  for (auto entry = partial_.begin(); entry != partial_.end();) {
    if (entry->first.session == session) {
      take(entry->second, dropped);
      entry = partial_.erase(entry);
    } else {
      ++entry;
    }
  }
}

} // namespace torch_ucx_rpc::wire
