#include "wire/assembler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace torch_ucx_rpc::wire {
namespace {

// A fixture that numbers its rendezvous, and finally checks that the assembler returned each exactly once.
class AssemblerTest : public testing::Test {
 protected:
  static constexpr uint64_t kSession = 77;

  static Header header(uint32_t index, uint32_t spanCount, uint64_t callId = 1, Kind kind = Kind::kRequest) {
    Header made;
    made.kind = kind;
    made.sourceSession = kSession;
    made.callId = callId;
    made.index = index;
    made.spanCount = spanCount;
    return made;
  }

  // Adds a piece of span 0.
  Assembler::Outcome addPiece(uint64_t offset, uint64_t bytes, uint64_t spanBytes = 100, uint32_t spanCount = 1) {
    Header made = header(0, spanCount);
    made.place = {offset, spanBytes};
    return add(made, rendezvous(bytes));
  }

  Piece rendezvous(uint64_t bytes = 100'000) {
    ++made_;
    return {{}, reinterpret_cast<void*>(made_ * 16), bytes};
  }

  Assembler::Outcome add(const Header& header) {
    return add(header, rendezvous());
  }
  // Adds a piece. It is a whole span unless the header says otherwise.
  Assembler::Outcome add(Header header, Piece piece) {
    if (header.index != kBodyIndex && header.place.spanBytes == 0) {
      header.place = {0, piece.size()};
    }
    std::vector<Piece> rejected;
    const Assembler::Outcome outcome = assembler_.add(header, std::move(piece), assembled_, rejected);
    const bool isOut = outcome == Assembler::Outcome::kRejected || outcome == Assembler::Outcome::kGivenUp;
    EXPECT_EQ(rejected.empty(), !isOut);
    note(rejected);
    if (outcome == Assembler::Outcome::kWhole) {
      note(assembled_.body);
      for (const Assembled::Span& span : assembled_.spans) {
        note(span.pieces);
      }
    }
    return outcome;
  }

  void note(const Piece& piece) {
    if (piece.rendezvous != nullptr) {
      EXPECT_TRUE(out_.insert(piece.rendezvous).second) << "a piece came out twice";
    }
  }
  void note(const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      note(piece);
    }
  }

  void TearDown() override {
    std::vector<Piece> dropped;
    assembler_.dropSession(kSession, dropped);
    note(dropped);
    EXPECT_EQ(out_.size(), made_) << "pieces handed in and never handed out";
    EXPECT_EQ(assembler_.incomplete(), 0u);
  }

  static constexpr uint64_t kOffsets[] = {0, 10, 40, 90};

  Assembler assembler_;
  Assembled assembled_;
  uint64_t made_ = 0;
  std::set<void*> out_;
};

TEST_F(AssemblerTest, BodyWithoutSpansIsWholeAtOnce) {
  EXPECT_EQ(
      add(header(kBodyIndex, 0), {Bytes(std::as_bytes(std::span("body", 4))), nullptr, 0}), Assembler::Outcome::kWhole);
  EXPECT_EQ(assembled_.body.size(), 4u);
  EXPECT_TRUE(assembled_.spans.empty());
  EXPECT_EQ(assembler_.incomplete(), 0u);
}

TEST_F(AssemblerTest, EveryOrderOfArrivalGivesTheSameMessage) {
  std::array<uint32_t, 4> order = {0, 1, 2, kBodyIndex};
  uint64_t callId = 0;
  do {
    ++callId;
    for (size_t arrived = 0; arrived < order.size(); ++arrived) {
      const uint32_t index = order[arrived];
      const auto outcome = add(header(index, 3, callId), rendezvous(index == kBodyIndex ? 1000 : 100 + index));
      EXPECT_EQ(outcome, arrived + 1 == order.size() ? Assembler::Outcome::kWhole : Assembler::Outcome::kIncomplete);
    }
    EXPECT_EQ(assembled_.header.index, kBodyIndex);
    EXPECT_EQ(assembled_.header.callId, callId);
    EXPECT_EQ(assembled_.body.size(), 1000u);
    ASSERT_EQ(assembled_.spans.size(), 3u);
    for (uint32_t index = 0; index < 3; ++index) {
      EXPECT_EQ(assembled_.spans[index].bytes, 100u + index);
    }
    EXPECT_EQ(assembler_.incomplete(), 0u);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(callId, 24u);
}

TEST_F(AssemblerTest, PiecesOfASpanArriveInEveryOrder) {
  std::array<uint64_t, 4> offsets = {0, 10, 40, 90};
  do {
    EXPECT_EQ(add(header(kBodyIndex, 1)), Assembler::Outcome::kIncomplete);
    for (const uint64_t offset : offsets) {
      const uint64_t end = offset == 90 ? 100 : *std::upper_bound(std::begin(kOffsets), std::end(kOffsets), offset);
      EXPECT_EQ(
          addPiece(offset, end - offset),
          offset == offsets.back() ? Assembler::Outcome::kWhole : Assembler::Outcome::kIncomplete);
    }
    ASSERT_EQ(assembled_.spans.size(), 1u);
    EXPECT_EQ(assembled_.spans[0].bytes, 100u);
    ASSERT_EQ(assembled_.spans[0].pieces.size(), 4u);
    for (size_t index = 0; index < 4; ++index) {
      EXPECT_EQ(assembled_.spans[0].pieces[index].offset, kOffsets[index]);
    }
  } while (std::next_permutation(offsets.begin(), offsets.end()));
}

TEST_F(AssemblerTest, PiecesThatOverlapRejectTheMessage) {
  EXPECT_EQ(addPiece(0, 50), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(addPiece(40, 40), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(kBodyIndex, 1)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(out_.size(), 0u);
  EXPECT_EQ(addPiece(90, 10), Assembler::Outcome::kRejected); // 100 bytes have come, but they overlap
  EXPECT_EQ(out_.size(), 4u);
  EXPECT_EQ(assembler_.incomplete(), 0u);
}

TEST_F(AssemblerTest, PiecesThatAreTooManyRejectTheMessage) {
  EXPECT_EQ(addPiece(0, 50), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(addPiece(50, 51), Assembler::Outcome::kRejected);
  EXPECT_EQ(out_.size(), 2u);
}

TEST_F(AssemblerTest, PiecesThatContradictEachOtherOnTheirSpanRejectTheMessage) {
  EXPECT_EQ(addPiece(0, 50, 100), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(addPiece(50, 50, 101), Assembler::Outcome::kRejected);
}

TEST_F(AssemblerTest, EmptyPiecesOfANonEmptySpanRejectTheMessage) {
  EXPECT_EQ(addPiece(0, 0), Assembler::Outcome::kRejected); // else there could be any number of them
}

TEST_F(AssemblerTest, PiecesOfAMessageThatWasCanceledAreHandedOutUpToTheLast) {
  addPiece(0, 50, 100, 2);
  std::vector<Piece> dropped;
  assembler_.cancel(kSession, Kind::kRequest, 1, dropped);
  note(dropped);
  EXPECT_EQ(addPiece(50, 50, 100, 2), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(1, 2)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(kBodyIndex, 2)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(0, 2)), Assembler::Outcome::kIncomplete); // nothing is remembered
}

TEST_F(AssemblerTest, MessagesArriveInterleavedAndStayApart) {
  constexpr uint64_t kMessages = 50;
  std::vector<Header> frames;
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    for (const Kind kind : {Kind::kRequest, Kind::kResponse}) { // both have the same call id
      for (const uint32_t index : {0u, 1u, kBodyIndex}) {
        frames.push_back(header(index, 2, callId, kind));
      }
    }
  }
  std::shuffle(frames.begin(), frames.end(), std::mt19937(1));
  size_t whole = 0;
  for (const Header& frame : frames) {
    if (add(frame, rendezvous(frame.callId * 8 + 3 * static_cast<uint64_t>(frame.kind))) ==
        Assembler::Outcome::kWhole) {
      ++whole;
      const uint64_t expected = assembled_.header.callId * 8 + 3 * static_cast<uint64_t>(assembled_.header.kind);
      EXPECT_EQ(assembled_.body.size(), expected);
      EXPECT_EQ(assembled_.spans[0].bytes, expected);
      EXPECT_EQ(assembled_.spans[1].bytes, expected);
    }
  }
  EXPECT_EQ(whole, 2 * kMessages);
}

TEST_F(AssemblerTest, SessionsStayApart) {
  Header other = header(0, 1);
  other.sourceSession = kSession + 1;
  EXPECT_EQ(add(header(kBodyIndex, 1)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(other), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(assembler_.incomplete(), 2u);
  std::vector<Piece> dropped;
  assembler_.dropSession(kSession + 1, dropped);
  EXPECT_EQ(dropped.size(), 1u);
  note(dropped);
  EXPECT_EQ(assembler_.incomplete(), 1u);
}

TEST_F(AssemblerTest, DoubledSpanRejectsTheMessage) {
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(kBodyIndex, 3)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kRejected);
  EXPECT_EQ(out_.size(), 3u);
  EXPECT_EQ(assembler_.incomplete(), 0u);
}

TEST_F(AssemblerTest, DoubledBodyRejectsTheMessage) {
  EXPECT_EQ(add(header(kBodyIndex, 2)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(1, 2)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(kBodyIndex, 2)), Assembler::Outcome::kRejected);
  EXPECT_EQ(out_.size(), 3u);
}

TEST_F(AssemblerTest, ContradictingSpanCountsRejectTheMessage) {
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(1, 2)), Assembler::Outcome::kRejected);
  EXPECT_EQ(out_.size(), 2u);
  EXPECT_EQ(add(header(0, 3, 2)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(kBodyIndex, 4, 2)), Assembler::Outcome::kRejected);
  EXPECT_EQ(add(header(kBodyIndex, 3, 3)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(0, 1, 3)), Assembler::Outcome::kRejected);
}

TEST_F(AssemblerTest, BodyThatContradictsTheArrivedSpansIsRejected) {
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(add(header(kBodyIndex, 0)), Assembler::Outcome::kRejected);
  EXPECT_EQ(assembler_.incomplete(), 0u);
}

TEST_F(AssemblerTest, CancelHandsOutArrivedParts) {
  add(header(2, 3));
  add(header(kBodyIndex, 3));
  add(header(0, 3, 2)); // another call
  std::vector<Piece> dropped;
  assembler_.cancel(kSession, Kind::kRequest, 1, dropped);
  EXPECT_EQ(dropped.size(), 2u);
  note(dropped);
  EXPECT_EQ(assembler_.incomplete(), 1u);
}

TEST_F(AssemblerTest, PartsOfACanceledMessageAreHandedOutAtOnce) {
  add(header(2, 3));
  std::vector<Piece> dropped;
  assembler_.cancel(kSession, Kind::kRequest, 1, dropped);
  note(dropped);
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(kBodyIndex, 3)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(1, 3)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(out_.size(), 4u);
  // The part above was the last, so no state is left, and this one is new.
  EXPECT_EQ(add(header(0, 3)), Assembler::Outcome::kIncomplete);
}

TEST_F(AssemblerTest, PartsOfARejectedMessageAreHandedOutAtOnce) {
  add(header(0, 2));
  EXPECT_EQ(add(header(0, 2)), Assembler::Outcome::kRejected);
  EXPECT_EQ(add(header(1, 2)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(add(header(kBodyIndex, 2)), Assembler::Outcome::kGivenUp);
  EXPECT_EQ(out_.size(), 4u);
}

TEST_F(AssemblerTest, CancelOfAnUnknownMessageDoesNothing) {
  add(header(0, 3));
  std::vector<Piece> dropped;
  assembler_.cancel(kSession, Kind::kRequest, 2, dropped);
  assembler_.cancel(kSession, Kind::kResponse, 1, dropped);
  assembler_.cancel(kSession + 1, Kind::kRequest, 1, dropped);
  EXPECT_TRUE(dropped.empty());
  EXPECT_EQ(assembler_.incomplete(), 1u);
}

TEST_F(AssemblerTest, DropSessionHandsOutEverythingOfIt) {
  for (uint64_t callId = 0; callId < 20; ++callId) {
    add(header(0, 2, callId));
    if (callId % 2 == 0) {
      add(header(kBodyIndex, 2, callId));
    }
  }
  std::vector<Piece> dropped;
  assembler_.dropSession(kSession, dropped);
  EXPECT_EQ(dropped.size(), 30u);
  note(dropped);
  EXPECT_EQ(assembler_.incomplete(), 0u);
}

TEST_F(AssemblerTest, AnnouncedSpansCostNothingUntilTheyArrive) {
  // A hundred thousand messages that each announce a million spans: memory for all announcements would be terabytes.
  for (uint64_t callId = 0; callId < 100'000; ++callId) {
    ASSERT_EQ(add(header(kMaxSpans - 1, kMaxSpans, callId), {}), Assembler::Outcome::kIncomplete);
  }
  EXPECT_EQ(assembler_.incomplete(), 100'000u);
}

// For any sequence of frames, valid or not, each rendezvous comes out exactly once (TearDown checks it).
TEST_F(AssemblerTest, RandomFramesNeverLoseAPiece) {
  std::mt19937 random(7);
  for (int step = 0; step < 50'000; ++step) {
    const uint32_t spanCount = 1 + random() % 3;
    const uint32_t index = random() % 4 == 0 ? kBodyIndex : static_cast<uint32_t>(random() % spanCount);
    const Kind kind = random() % 2 == 0 ? Kind::kRequest : Kind::kResponse;
    Header made = header(index, spanCount, random() % 8, kind);
    if (index != kBodyIndex) {
      made.place = {random() % 3, 1 + random() % 4};
    }
    add(made, rendezvous(random() % 4));
    if (random() % 16 == 0) {
      std::vector<Piece> dropped;
      assembler_.cancel(kSession, kind, random() % 8, dropped);
      note(dropped);
    }
  }
}

// This memory does not exist: rendezvous are only announced.
TEST_F(AssemblerTest, PiecesBeyond4GiBKeepTheirPlaces) {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  EXPECT_EQ(addPiece(9 * kGiB / 2, kGiB / 2, 5 * kGiB), Assembler::Outcome::kIncomplete);
  EXPECT_EQ(addPiece(0, 9 * kGiB / 2, 5 * kGiB), Assembler::Outcome::kIncomplete);
  ASSERT_EQ(add(header(kBodyIndex, 1)), Assembler::Outcome::kWhole);
  ASSERT_EQ(assembled_.spans.size(), 1u);
  const std::vector<Piece>& pieces = assembled_.spans[0].pieces;
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].offset, 0u);
  EXPECT_EQ(pieces[1].offset, 9 * kGiB / 2);
}

} // namespace
} // namespace torch_ucx_rpc::wire
