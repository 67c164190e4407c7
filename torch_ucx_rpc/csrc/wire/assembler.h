#pragma once

#include "base/bytes.h"
#include "wire/header.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc::wire {

// One active message as it arrived: its bytes, or a handle for bytes that still wait at the sender. A rendezvous must
// be received or released exactly once. The assembler only passes it on.
struct Piece {
  Bytes data; // empty for a rendezvous
  void* rendezvous = nullptr; // an Announcement of messaging/receiving.h
  uint64_t rendezvousBytes = 0;
  uint64_t offset = 0; // in its span

  bool isRendezvous() const {
    return rendezvous != nullptr;
  }
  uint64_t size() const {
    return isRendezvous() ? rendezvousBytes : data.size();
  }
};

// A message whose pieces are all known, whether their bytes are here or not.
struct Assembled {
  struct Span {
    uint64_t bytes = 0;
    std::vector<Piece> pieces; // from its first byte to its last
  };

  // Visits the body and the pieces of all spans.
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

// Joins the body of a message with the pieces of its spans, in any order of arrival.
//
// The assembler hands back every piece exactly once: in an assembled message, or among the rejected or dropped pieces.
// The assembler allocates in proportion to the bytes that have arrived, never to those that a header announces. Not
// thread-safe: its owner holds the worker lock.
class Assembler {
 public:
  enum class Outcome { kIncomplete, kWhole, kRejected, kGivenUp };

  // Takes the piece that came with `header`, which readHeader() has checked.
  // - kIncomplete: the piece is kept.
  // - kWhole: `assembled` is filled.
  // - kRejected: the piece contradicts its message or overlaps another piece. The message is given up, and `rejected`
  //   gets all its pieces.
  // - kGivenUp: the piece belongs to a message that was given up before, and is in `rejected`.
  Outcome add(const Header& header, Piece piece, Assembled& assembled, std::vector<Piece>& rejected);

  // Gives up an incomplete message whose caller has given up the call. Its pieces go to `dropped`. For its later
  // pieces, add() returns kGivenUp.
  void cancel(uint64_t session, Kind kind, uint64_t callId, std::vector<Piece>& dropped);

  // Forgets every incomplete message of a session whose worker is gone. Their pieces go to `dropped`.
  void dropSession(uint64_t session, std::vector<Piece>& dropped);

  // Counts the messages that are neither whole nor given up.
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
  // A message that was given up keeps no pieces, only counts of those that have come.
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

  // Notes a piece. Returns false, and notes nothing, if the piece contradicts earlier parts.
  static bool note(Partial& partial, const Header& header, uint64_t bytes);
  static void take(Partial& partial, std::vector<Piece>& into);
  static void giveUp(Partial& partial, std::vector<Piece>& dropped);

  Partials partial_;
};

} // namespace torch_ucx_rpc::wire
