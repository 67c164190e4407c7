// Large messages are received piece by piece, and bad frames are refused.

#include "messaging/inbox.h"

#include "assume_worker_lock.h"
#include "event_log.h"
#include "messaging/outbox.h"
#include "patient_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kPiece = OutgoingMessage::kPieceBytes;

class InboxTest : public testing::Test {
 protected:
  static constexpr uint64_t kSession = 100; // this worker's
  static constexpr size_t kInFlightAtOnce = Receiver::kInFlightBytes / kPiece;

  InboxTest() {
    for (Rank rank = 1; rank <= 2; ++rank) {
      Member member;
      member.rank = rank;
      member.name = "w" + std::to_string(rank);
      member.session = kSession + static_cast<uint64_t>(rank);
      directory_.add(member);
    }
  }

  // Announces the body and the pieces of a message of one span. The handles of the pieces are the numbers after
  // `firstNumber`.
  void announce(
      Rank rank, uint64_t callId, uint64_t bytes, uintptr_t firstNumber, wire::Kind kind = wire::Kind::kRequest) {
    OutgoingMessage message;
    const std::span<const std::byte> memory(static_cast<const std::byte*>(nullptr), bytes);
    message.spans.push_back({memory});
    message.address(kind, kSession + static_cast<uint64_t>(rank), rank, kSession, callId);
    for (const OutgoingMessage::Piece& piece : message.pieces) {
      inbox_.onRendezvous(
          std::as_bytes(std::span(&piece.header, 1)), reinterpret_cast<void*>(firstNumber++), piece.bytes.size());
    }
    const Bytes body(std::as_bytes(std::span("body", 4)));
    inbox_.onEager(std::as_bytes(std::span(&message.header, 1)), body);
  }

  void complete(Error error = {}) {
    transport_.complete(std::move(error));
    startDeferred();
  }

  // Does a round, as Messenger does.
  void startDeferred() {
    inbox_.admitWaiting();
    connections_.forEachReady([this](Connection& connection) { inbox_.receiver().startDeferred(connection); });
    inbox_.receiver().releaseAll();
  }
  bool hasDeferred() const {
    return connections_.hasReady() || inbox_.hasMadeRoom();
  }

  Peer& peer(Rank rank) {
    return directory_.at(rank);
  }
  Connection& connection(Rank rank) {
    return connections_.of(peer(rank));
  }

  using Notes = std::vector<std::string>; // the events that the handlers got

  const AssumeWorkerLock lock_;
  PatientTransport transport_;
  Directory directory_;
  EventLog events_;
  PushShare share_;
  const Identity self_{0, "w0", kSession};
  Connections connections_;
  Outbox outbox_{transport_, self_, connections_, share_, events_.buffer};
  DevicesInUse devices_;
  const std::shared_ptr<ReceiveWindow> window_ = std::make_shared<ReceiveWindow>(1ull << 30, [] {});
  Inbox inbox_{
      {transport_, connections_, window_, events_.handlers.all, devices_, events_.buffer, [] {}}, directory_, kSession};
};

TEST_F(InboxTest, ALargeSpanIsReceivedAFewPiecesAtATime) {
  announce(1, 1, 9 * kPiece + 5, 1);
  startDeferred();
  for (size_t received = 0; received < 10; ++received) {
    ASSERT_TRUE(events_.buffer.isEmpty()) << received;
    EXPECT_EQ(transport_.begun, std::min<size_t>(10, received + kInFlightAtOnce));
    connection(1).silence.heardSinceCheck = false;
    complete();
    EXPECT_TRUE(connection(1).silence.heardSinceCheck) << "each piece is a sign of life";
  }
  ASSERT_EQ(events_.take(), Notes{"request 1"});
  const std::vector<IncomingMessage::Span>& spans = events_.handlers.requests[0].spans;
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].bytes, 9 * kPiece + 5);
  const auto* bytes = static_cast<const unsigned char*>(spans[0].data.get());
  for (uint64_t offset = 0; offset < spans[0].bytes; ++offset) {
    ASSERT_EQ(bytes[offset], 1 + offset / kPiece) << offset;
  }
}

TEST_F(InboxTest, APieceThatComesEagerlyIsRefused) {
  OutgoingMessage message;
  message.spans.push_back({std::as_bytes(std::span("span", 4))});
  message.address(wire::Kind::kRequest, kSession + 1, 1, kSession, 1);
  inbox_.onEager(std::as_bytes(std::span(&message.pieces[0].header, 1)), message.pieces[0].bytes);
  EXPECT_EQ(inbox_.refusedFrames(), 1u);
}

// The peer may take the end of the connection for the end of this worker, and drop all later messages.
TEST_F(InboxTest, APeerIsWatchedByItsAnswersOnceThisProcessHasLostItsEndpoint) {
  outbox_.sendControl(peer(1), wire::Kind::kPing);
  ASSERT_TRUE(connection(1).endpoint().has_value());
  (void)events_.take();
  inbox_.onEndpointFailed(*connection(1).endpoint(), {ErrorCode::kOutOfFiles, "too many files"});
  EXPECT_FALSE(connection(1).endpoint().has_value());
  EXPECT_TRUE(peer(1).needsHeartbeat.load());
  EXPECT_EQ(events_.take(), Notes{}) << "it is not lost";
}

TEST_F(InboxTest, MessagesOfAPeerTakeTurns) {
  announce(1, 1, 8 * kPiece, 1);
  startDeferred();
  std::this_thread::sleep_for(2 * Receiver::kSlow); // the first message is slow, so the next does not wait for its end
  announce(1, 2, 100'000, 50);
  startDeferred();
  EXPECT_EQ(transport_.begun, kInFlightAtOnce);
  complete();
  complete();
  complete();
  EXPECT_TRUE(events_.buffer.isEmpty());
  complete();
  EXPECT_EQ(events_.take(), Notes{"request 2"}) << "after the pieces asked for before it, and one more";
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{"request 1"});
}

TEST_F(InboxTest, LargeMessagesDoNotKeepEachOtherFromBeingFinished) {
  announce(1, 1, 6 * kPiece, 1, wire::Kind::kResponse);
  startDeferred();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  announce(1, 2, 6 * kPiece, 50, wire::Kind::kResponse);
  for (int received = 0; received < 6; ++received) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{"answer 1"});
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{"answer 2"});
}

TEST_F(InboxTest, RestOfAnAbandonedMessageIsReleased) {
  announce(1, 1, 8 * kPiece, 1);
  announce(2, 2, 8 * kPiece, 50, wire::Kind::kResponse);
  startDeferred();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  startDeferred();
  EXPECT_EQ(transport_.begun, 2 * kInFlightAtOnce);
  wire::Header cancel;
  cancel.kind = wire::Kind::kCancel;
  cancel.sourceRank = 1;
  cancel.sourceSession = kSession + 1;
  cancel.targetSession = kSession;
  cancel.callId = 1;
  inbox_.onEager(std::as_bytes(std::span(&cancel, 1)), {});
  events_.handlers.abandonedCall = 2;
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(transport_.begun, 2 * kInFlightAtOnce);
  EXPECT_EQ(transport_.released.size(), 2 * (8 - kInFlightAtOnce));
  EXPECT_EQ(
      events_.take(), (Notes{"answer rejected: its call was given up 2", "request rejected: its call was given up 1"}));
}

TEST_F(InboxTest, PeersDoNotWaitForOneAnother) {
  announce(1, 1, 8 * kPiece, 1);
  startDeferred();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  announce(2, 1, 100'000, 50);
  startDeferred();
  EXPECT_EQ(transport_.begun, kInFlightAtOnce + 1);
  while (!transport_.asked.empty()) {
    complete();
  }
}

TEST_F(InboxTest, PiecesThatAreThereAtOnceLeaveRoomForOthers) {
  transport_.isImmediate = true;
  announce(1, 1, 7 * kPiece, 1);
  startDeferred();
  for (size_t begun = kInFlightAtOnce; begun < 7; begun += kInFlightAtOnce) {
    EXPECT_EQ(transport_.begun, begun);
    EXPECT_TRUE(hasDeferred());
    EXPECT_TRUE(events_.buffer.isEmpty());
    startDeferred();
  }
  EXPECT_EQ(transport_.begun, 7u);
  EXPECT_EQ(events_.take(), Notes{"request 1"});
  startDeferred();
  EXPECT_FALSE(hasDeferred());
}

TEST_F(InboxTest, WaiterBehindAnImmediateMessageIsNotForgotten) {
  transport_.isImmediate = true;
  announce(1, 1, 2 * kPiece, 1, wire::Kind::kResponse);
  announce(1, 2, 2 * kPiece, 50, wire::Kind::kResponse); // waits while the first message is received
  startDeferred();
  EXPECT_EQ(events_.take(), Notes{"answer 1"});
  EXPECT_TRUE(hasDeferred());
  startDeferred();
  EXPECT_EQ(events_.take(), Notes{"answer 2"});
  startDeferred();
  EXPECT_FALSE(hasDeferred());
}

TEST_F(InboxTest, APieceThatFailsFailsItsMessageAndTheRestIsReleased) {
  announce(1, 1, 8 * kPiece, 1);
  startDeferred();
  complete({ErrorCode::kPeerFailed, "broken"});
  EXPECT_TRUE(events_.buffer.isEmpty()) << "the transport still writes to its memory";
  EXPECT_EQ(transport_.released.size(), 8 - kInFlightAtOnce);
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{"request rejected: broken 1"});
  EXPECT_EQ(transport_.begun, kInFlightAtOnce);
}

TEST_F(InboxTest, TheRestOfAMessageOfAPeerThatIsGoneIsReleased) {
  announce(1, 1, 8 * kPiece, 1);
  announce(2, 1, kPiece, 50);
  startDeferred();
  inbox_.dropPeer(peer(1));
  const Notes rejected = events_.take();
  ASSERT_EQ(rejected.size(), 1u);
  EXPECT_TRUE(rejected[0].starts_with("request rejected: worker 'w1'")) << rejected[0];
  startDeferred();
  EXPECT_EQ(transport_.released.size(), 8 - kInFlightAtOnce);
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{"request 1"}) << "of the other peer";
}

// A wait may have the value already, so that the end of the peer does not reach it otherwise.
TEST_F(InboxTest, AValueThatWaitsForItsTurnIsRejectedWithItsSender) {
  announce(1, 1, 8 * kPiece, 1, wire::Kind::kPut);
  announce(1, 2, 8 * kPiece, 100, wire::Kind::kPut);
  startDeferred();
  EXPECT_EQ(events_.take(), (Notes{"put announced 1", "put announced 2"}));
  inbox_.dropPeer(peer(1));
  const std::string rejected = "put rejected: " + peer(1).describe() + " is gone ";
  EXPECT_EQ(events_.take(), (Notes{rejected + "2", rejected + "1"}));
  startDeferred();
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(events_.take(), Notes{}) << "they have been rejected once";
}

TEST_F(InboxTest, RefusedFramesAreCountedAndLoggedOnceForEachSort) {
  wire::Header stranger;
  stranger.targetSession = kSession;
  stranger.sourceSession = 4711;
  wire::Header other;
  other.targetSession = kSession + 1;
  testing::internal::CaptureStderr();
  for (int time = 0; time < 3; ++time) {
    inbox_.onEager(std::as_bytes(std::span(&stranger, 1)), {});
    inbox_.onEager(std::as_bytes(std::span(&other, 1)), {});
  }
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_EQ(inbox_.refusedFrames(), 6u);
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 2) << warnings;
  EXPECT_NE(warnings.find("not a worker of this job"), std::string::npos) << warnings;
}

TEST_F(InboxTest, UnfinishedReceivesFailWhenItCloses) {
  announce(1, 1, 8 * kPiece, 1);
  startDeferred();
  inbox_.receiver().close();
  while (!transport_.asked.empty()) {
    transport_.complete({ErrorCode::kCanceled, "closed"});
  }
  EXPECT_EQ(events_.take(), Notes{"request rejected: RPC has been shut down on this worker 1"});
}

} // namespace
} // namespace torch_ucx_rpc
