#include "wire/assembler.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_ucx_rpc::wire {

namespace {

// Sorts the pieces of a span. Returns true if they cover the span without a gap.
bool sortAndCheckCoverage(Assembled::Span& span) {
  std::sort(span.pieces.begin(), span.pieces.end(), [](const Piece& one, const Piece& other) {
    return one.offset < other.offset;
  });
  uint64_t end = 0;
  for (const Piece& piece : span.pieces) {
    if (piece.offset != end) {
      return false;
    }
    end += piece.size();
  }
  return end == span.bytes;
}

} // namespace

bool Assembler::note(Partial& partial, const Header& header, uint64_t bytes) {
  if (header.spanCount != partial.header.spanCount) {
    return false;
  }
  if (header.index == kBodyIndex) {
    return !std::exchange(partial.hasBody, true);
  }
  // A span with bytes needs no empty piece. Without this check, a peer could send empty pieces for ever.
  const uint64_t spanBytes = header.place.spanBytes;
  if (bytes > spanBytes || (bytes == 0 && spanBytes != 0)) {
    return false;
  }
  const auto [entry, isNew] = partial.spans.try_emplace(header.index);
  PartialSpan& span = entry->second;
  if (isNew) {
    span.span.bytes = spanBytes;
    span.missing = spanBytes;
  } else if (spanBytes != span.span.bytes || span.missing == 0 || bytes > span.missing) {
    return false;
  }
  span.missing -= bytes;
  partial.wholeSpans += span.missing == 0 ? 1 : 0;
  return true;
}

Assembler::Outcome Assembler::add(
    const Header& header, Piece piece, Assembled& assembled, std::vector<Piece>& rejected) {
  const bool isBody = header.index == kBodyIndex;
  const Key key{header.sourceSession, header.callId, header.kind};
  if (isBody && header.spanCount == 0 && (partial_.empty() || !partial_.contains(key))) {
    assembled = {header, std::move(piece), {}}; // most messages have nothing to join
    return Outcome::kWhole;
  }

  auto [entry, isNew] = partial_.try_emplace(key);
  Partial& partial = entry->second;
  if (isNew) {
    partial.header = header; // perhaps a piece's header: only its span count is used until the body arrives
  }
  const bool isNoted = note(partial, header, piece.size());
  // note() still counts the parts of a message that was given up. The last part ends its entry.
  if (partial.isGivenUp) {
    rejected.push_back(std::move(piece));
    if (partial.isWhole()) {
      partial_.erase(entry);
    }
    return Outcome::kGivenUp;
  }
  if (isNoted && isBody) {
    partial.header = header;
    partial.body = std::move(piece);
  } else if (isNoted) {
    piece.offset = header.place.offset;
    partial.spans[header.index].span.pieces.push_back(std::move(piece));
  } else {
    rejected.push_back(std::move(piece));
  }
  // The sizes add up already, so pieces that overlap leave a gap elsewhere.
  const auto hasGap = [](auto& span) { return !sortAndCheckCoverage(span.second.span); };
  if (!isNoted || (partial.isWhole() && std::any_of(partial.spans.begin(), partial.spans.end(), hasGap))) {
    giveUp(partial, rejected);
    if (partial.isWhole()) {
      partial_.erase(entry);
    }
    return Outcome::kRejected;
  }
  if (!partial.isWhole()) {
    return Outcome::kIncomplete;
  }

  assembled.header = partial.header;
  assembled.body = std::move(partial.body);
  // readHeader() has checked each index against the span count, and all spans are whole. So the indices are 0, 1, ...
  assembled.spans.resize(partial.spans.size());
  for (auto& [index, span] : partial.spans) {
    assembled.spans[index] = std::move(span.span);
  }
  partial_.erase(entry);
  return Outcome::kWhole;
}

void Assembler::take(Partial& partial, std::vector<Piece>& into) {
  if (partial.isGivenUp) {
    return;
  }
  if (partial.hasBody) {
    into.push_back(std::move(partial.body));
  }
  for (auto& [index, span] : partial.spans) {
    std::move(span.span.pieces.begin(), span.span.pieces.end(), std::back_inserter(into));
  }
}

void Assembler::cancel(uint64_t session, Kind kind, uint64_t callId, std::vector<Piece>& dropped) {
  const auto entry = partial_.find(Key{session, callId, kind});
  if (entry != partial_.end() && !entry->second.isGivenUp) {
    giveUp(entry->second, dropped);
  }
}

void Assembler::giveUp(Partial& partial, std::vector<Piece>& dropped) {
  take(partial, dropped);
  for (auto& [index, span] : partial.spans) {
    span.span.pieces.clear();
  }
  partial.isGivenUp = true;
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
