#pragma once

#include "base/bytes.h"
#include "wire/header.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc::wire {

// One active message as it arrived: its bytes, or the transport's handle for bytes that still wait at the sender.
// A parked piece must be received or refused exactly once; the assembler only passes it on.
struct Piece {
  Bytes data; // empty when parked
  void* parked = nullptr;
  uint64_t parkedBytes = 0;
  uint64_t offset = 0; // in its span

  bool isParked() const {
    return parked != nullptr;
  }
  uint64_t size() const {
    return isParked() ? parkedBytes : data.size();
  }
  // For what is not parked: to its place in the memory of its span.
  void copyInto(void* span) const {
    std::copy_n(data.data(), data.size(), static_cast<std::byte*>(span) + offset);
  }
};

// A message of which every piece is known.
struct Assembled {
  struct Span {
    uint64_t bytes = 0;
    std::vector<Piece> pieces; // from its first byte to its last
  };

  // The body, and the pieces of all spans.
  template <class Callback>
  void forEachPiece(Callback callback) {
    callback(body);
    for (Span& span : spans) {
      for (Piece& piece : span.pieces) {
        callback(piece);
      }
    }
  }

  Header header; // the body's
  Piece body;
  std::vector<Span> spans;
};

// Joins the body of a message with the pieces of its spans, in whatever order they arrive. Not thread-safe: it is used under
// the worker lock. It allocates in proportion to what has really arrived, never to what a header announces.
class Assembler {
 public:
  enum class Outcome { kIncomplete, kWhole, kRejected, kGivenUp };

  // Takes the piece that came with `header` (checked by readHeader). kWhole: `assembled` is filled. kRejected: the piece
  // contradicts its message or overlaps another piece; `rejected` gets all pieces of that message, which is given up. kGivenUp: it
  // belongs to a message that was, and is in `rejected`.
  Outcome add(const Header& header, Piece piece, Assembled& assembled, std::vector<Piece>& rejected);

  // Gives up an incomplete message (its caller has too); its pieces go to `dropped`. What is still to come of it is
  // recognized by add(), up to the last piece.
  void cancel(uint64_t session, Kind kind, uint64_t callId, std::vector<Piece>& dropped);

  // Forgets every incomplete message of a session (its worker is gone); their pieces go to `dropped`.
  void dropSession(uint64_t session, std::vector<Piece>& dropped);

  // Messages that are not whole yet, without those that are given up.
  size_t incomplete() const;

 private:
  struct Key {
    uint64_t session;
    uint64_t callId;
    Kind kind;
    bool operator==(const Key&) const = default;
  };
  struct HashKey {
    size_t operator()(const Key& key) const {
      // Sessions are random; call ids count up. The kind separates a request from the response of the same number.
      return key.session ^ (key.callId * 0x9E3779B97F4A7C15ull) ^ static_cast<size_t>(key.kind);
    }
  };
  struct PartialSpan {
    Assembled::Span span;
    uint64_t missing = 0; // bytes
  };
  // Of one that is given up, only what has come is noted.
  struct Partial {
    bool hasBody = false;
    Header header;
    Piece body;
    std::unordered_map<uint32_t, PartialSpan> spans;
    size_t wholeSpans = 0;
    bool isGivenUp = false;

    bool isWhole() const {
      return hasBody && wholeSpans == header.spanCount;
    }
  };
  using Partials = std::unordered_map<Key, Partial, HashKey>;

  // False where it contradicts what has come, and nothing is noted then.
  static bool note(Partial& partial, const Header& header, uint64_t bytes);
  static void take(Partial& partial, std::vector<Piece>& into);
  static void giveUp(Partial& partial, std::vector<Piece>& dropped);

  Partials partial_;
};

} // namespace torch_ucx_rpc::wire
