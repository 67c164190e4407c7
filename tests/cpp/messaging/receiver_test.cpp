// How an admitted message gets into memory, and when its share of the window ends.

#include "messaging/receiver.h"

#include "assume_worker_lock.h"
#include "event_log.h"
#include "patient_transport.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using wire::Kind;

constexpr uint64_t kPiece = OutgoingMessage::kPieceBytes;
constexpr size_t kInFlightAtOnce = Receiver::kInFlightPieces;

class ReceiverTest : public testing::Test {
 protected:
  ~ReceiverTest() override {
    while (!transport_.asked.empty()) {
      transport_.complete({ErrorCode::kCanceled, "closed"});
    }
    (void)events_.take();
    events_.handlers.requests.clear();
    events_.handlers.answers.clear();
    EXPECT_EQ(window_->inUseBytes(), 0u) << "shares of the window were not given back";
    EXPECT_EQ(HostPool::instance().statistics().inUseBytes, poolBytesAtStart_) << "memory was not given back";
  }

  // Announces a message as Inbox does, without a number.
  wire::Piece rendezvous(uintptr_t number, uint64_t bytes, uint64_t offset = 0) {
    Connection& from = connections_.of(peer_);
    const uint64_t key = ~from.incoming.unnumbered++;
    const Announcement announcement{&from, key, reinterpret_cast<void*>(number), false};
    return {{}, &from.incoming.announced.emplace(key, announcement).first->second, bytes, offset};
  }
  static wire::Piece eager(const std::string& text) {
    return {Bytes(std::as_bytes(std::span(text))), nullptr, 0};
  }

  Receiver::Announced announced(Kind kind, uint64_t callId, uint64_t bytes, wire::Piece body) {
    wire::Assembled assembled;
    assembled.header.kind = kind;
    assembled.header.callId = callId;
    assembled.body = std::move(body);
    return {&connections_.of(peer_), std::move(assembled), bytes};
  }
  // A message of one span with `pieces` whole pieces. Their handles are the numbers from `firstNumber` on.
  Receiver::Announced announced(Kind kind, uint64_t callId, size_t pieces, uintptr_t firstNumber) {
    Receiver::Announced made = announced(kind, callId, pieces * kPiece, eager("body"));
    wire::Assembled::Span span{pieces * kPiece, {}};
    for (size_t piece = 0; piece < pieces; ++piece) {
      span.pieces.push_back(rendezvous(firstNumber + piece, kPiece, piece * kPiece));
    }
    made.assembled.spans.push_back(std::move(span));
    return made;
  }

  void start(Receiver::Announced message) {
    Admission admission;
    window_->admit(message.assembled.header.kind == Kind::kResponse, message.bytes, admission);
    receiver_.start(std::move(message), std::move(admission));
  }
  void complete(Error error = {}) {
    transport_.complete(std::move(error));
    startDeferred();
  }
  void completeAll() {
    while (!transport_.asked.empty()) {
      complete();
    }
  }

  // Does a round, as Messenger does.
  void startDeferred() {
    receiver_.beginRound();
    connections_.forEachReady([this](Connection& connection) { receiver_.startDeferred(connection); });
    receiver_.releaseAll();
  }

  using Notes = std::vector<std::string>;

  const uint64_t poolBytesAtStart_ = HostPool::instance().statistics().inUseBytes;
  const AssumeWorkerLock lock_;
  PatientTransport transport_;
  Connections connections_;
  Peer peer_{memberOf(1)};
  Peer other_{memberOf(2)};
  DevicesInUse devices_;
  const std::shared_ptr<ReceiveWindow> window_ = std::make_shared<ReceiveWindow>(1ull << 30, [] {});
  EventLog events_;
  Receiver receiver_{{transport_, connections_, window_, events_.handlers.all, devices_, events_.buffer, [] {}}};
};

TEST_F(ReceiverTest, NothingIsAskedForInsideATransportCallback) {
  start(announced(Kind::kRequest, 1, 1, 10));
  EXPECT_EQ(transport_.begun, 0u);
  startDeferred();
  EXPECT_EQ(transport_.begun, 1u);
  complete();
  EXPECT_EQ(events_.take(), Notes{"request 1"});
}

TEST_F(ReceiverTest, BodyAndPiecesGetToTheirPlaces) {
  Receiver::Announced message = announced(Kind::kResponse, 1, 70, rendezvous(9, 50));
  message.assembled.spans.push_back({30, {}});
  message.assembled.spans[0].pieces.push_back(rendezvous(3, 10, 0));
  message.assembled.spans[0].pieces.push_back(rendezvous(5, 10, 10));
  message.assembled.spans[0].pieces.push_back(rendezvous(4, 10, 20));
  start(std::move(message));
  startDeferred();
  completeAll();
  ASSERT_EQ(events_.take(), Notes{"answer 1"});
  const IncomingMessage& answer = events_.handlers.answers[0];
  EXPECT_EQ(answer.from, &peer_);
  EXPECT_EQ(answer.body().size(), 50u);
  EXPECT_EQ(answer.body()[49], std::byte{9});
  EXPECT_EQ(answer.totalBytes(), 80u);
  ASSERT_EQ(answer.spans.size(), 1u);
  const std::string span(static_cast<const char*>(answer.spans[0].data.get()), 30);
  EXPECT_EQ(span, std::string(10, '\3') + std::string(10, '\5') + std::string(10, '\4'));
}

TEST_F(ReceiverTest, ShareOfTheWindowTravelsWithTheMessage) {
  start(announced(Kind::kRequest, 1, 1, 10));
  EXPECT_EQ(window_->receivingMessages.load(), 1u);
  startDeferred();
  complete();
  EXPECT_EQ(window_->receivingMessages.load(), 0u);
  ASSERT_EQ(events_.take(), Notes{"request 1"});
  EXPECT_EQ(window_->inUseBytes(), kPiece);
  events_.handlers.requests.clear();
  EXPECT_EQ(window_->inUseBytes(), 0u);
}

TEST_F(ReceiverTest, AFewPiecesOfAPeerAreAskedForAtATime) {
  start(announced(Kind::kRequest, 1, 5, 10));
  startDeferred();
  EXPECT_EQ(transport_.asked.size(), kInFlightAtOnce);
  complete();
  EXPECT_EQ(transport_.begun, kInFlightAtOnce + 1);
  EXPECT_EQ(transport_.asked.size(), kInFlightAtOnce);
  EXPECT_FALSE(connections_.hasReady());
  transport_.complete();
  EXPECT_TRUE(connections_.hasReady()) << "there is room for the next";
  startDeferred();
  completeAll();
  EXPECT_EQ(transport_.begun, 5u);
  EXPECT_EQ(events_.take(), Notes{"request 1"});
}

TEST_F(ReceiverTest, PieceThatHasComeIsASignOfLife) {
  start(announced(Kind::kRequest, 1, 2, 10));
  startDeferred();
  EXPECT_FALSE(connections_.of(peer_).silence.heardSinceCheck);
  complete({ErrorCode::kPeerFailed, "broken"});
  EXPECT_FALSE(connections_.of(peer_).silence.heardSinceCheck) << "a failure is no sign of life";
  complete();
  EXPECT_TRUE(connections_.of(peer_).silence.heardSinceCheck);
}

TEST_F(ReceiverTest, ReceiverIsBusyUntilEnoughHasArrived) {
  EXPECT_FALSE(receiver_.isBusy(100 * Receiver::kReceivingBytes)) << "nothing is being received";
  const Receiver::Clock::time_point before = Receiver::Clock::now();
  start(announced(Kind::kRequest, 1, 100, rendezvous(10, 100)));
  EXPECT_TRUE(receiver_.isBusy(Receiver::kReceivingBytes, before));
  EXPECT_FALSE(receiver_.isBusy(Receiver::kReceivingBytes - 100, before));
  EXPECT_FALSE(receiver_.isBusy(Receiver::kReceivingBytes, Receiver::Clock::now() + Receiver::kSlow))
      << "a slow message does not keep others waiting";
  startDeferred();
  complete();
  EXPECT_FALSE(receiver_.isBusy(Receiver::kReceivingBytes, before));
}

TEST_F(ReceiverTest, MemoryOfDevicesIsCountedSeparately) {
  const Receiver::Clock::time_point before = Receiver::Clock::now();
  Receiver::Announced message = announced(Kind::kRequest, 1, 100, rendezvous(10, 100));
  message.deviceBytes = Receiver::kReceivingDeviceBytes;
  start(std::move(message));
  EXPECT_FALSE(receiver_.isBusy(Receiver::kReceivingBytes - 100, before));
  EXPECT_TRUE(receiver_.areDevicesBusy(1, before));
  EXPECT_FALSE(receiver_.areDevicesBusy(0, before)) << "a message for the host";
  startDeferred();
  completeAll();
  EXPECT_FALSE(receiver_.areDevicesBusy(1, before));
}

TEST_F(ReceiverTest, FinishedMessageIsKnownUntilTheNextStart) {
  start(announced(Kind::kRequest, 1, 1, 10));
  startDeferred();
  EXPECT_FALSE(receiver_.hasFinished());
  transport_.complete();
  EXPECT_TRUE(receiver_.hasFinished()) << "another may be admitted";
  startDeferred();
  EXPECT_FALSE(receiver_.hasFinished());
}

TEST_F(ReceiverTest, MessageIsRejectedIfThereIsNoMemoryForIt) {
  constexpr uint64_t kTooMuch = 1ull << 60;
  start(announced(Kind::kRequest, 1, kTooMuch, rendezvous(7, kTooMuch)));
  EXPECT_TRUE(events_.buffer.isEmpty()) << "not inside a transport callback";
  startDeferred();
  EXPECT_EQ(transport_.begun, 0u);
  EXPECT_EQ(transport_.released.size(), 1u) << "its sender is told";
  EXPECT_EQ(
      events_.take(),
      Notes{"request rejected: out of memory for a message of " + std::to_string(kTooMuch) + " bytes 1"});
  EXPECT_EQ(window_->inUseBytes(), 0u);
}

TEST_F(ReceiverTest, PiecesAreReleasedOnceAndOutsideCallbacks) {
  std::vector<wire::Piece> pieces;
  pieces.push_back(rendezvous(1, 10));
  pieces.push_back(eager("nothing to refuse"));
  pieces.push_back(rendezvous(2, 10));
  receiver_.release(pieces);
  receiver_.release(pieces);
  Receiver::Announced message = announced(Kind::kRequest, 1, 2, 10);
  receiver_.release(message.assembled);
  EXPECT_TRUE(transport_.released.empty()) << "not inside a transport callback";
  startDeferred();
  EXPECT_EQ(transport_.released.size(), 4u);
  startDeferred();
}

TEST_F(ReceiverTest, OnlyAnswersAreGivenUpWithTheirCalls) {
  events_.handlers.abandonedCall = 1;
  wire::Header header;
  header.callId = 1;
  header.kind = Kind::kResponse;
  EXPECT_TRUE(receiver_.isAbandoned(peer_, header));
  header.kind = Kind::kRequest;
  EXPECT_FALSE(receiver_.isAbandoned(peer_, header));
  header.kind = Kind::kResponse;
  header.callId = 2;
  EXPECT_FALSE(receiver_.isAbandoned(peer_, header));
}

TEST_F(ReceiverTest, RestOfAnAbandonedAnswerIsReleased) {
  start(announced(Kind::kResponse, 1, 5, 10));
  startDeferred();
  events_.handlers.abandonedCall = 1;
  complete();
  EXPECT_EQ(transport_.released.size(), 5 - kInFlightAtOnce);
  EXPECT_TRUE(events_.buffer.isEmpty()) << "the transport still writes to its memory";
  complete();
  EXPECT_EQ(events_.take(), Notes{"answer rejected: its call was given up 1"});
  EXPECT_EQ(transport_.begun, kInFlightAtOnce);
}

TEST_F(ReceiverTest, CancelGivesUpTheRequestOfThatPeerAndNothingElse) {
  start(announced(Kind::kRequest, 1, 5, 10));
  start(announced(Kind::kResponse, 1, 3, 20));
  Receiver::Announced others = announced(Kind::kRequest, 1, 3, 30);
  others.from = &connections_.of(other_);
  start(std::move(others));
  startDeferred();
  receiver_.cancel(connections_.of(peer_), 2);
  receiver_.cancel(connections_.of(peer_), 1);
  receiver_.cancel(connections_.of(peer_), 1);
  completeAll();
  EXPECT_FALSE(transport_.released.empty());
  EXPECT_EQ(transport_.begun + transport_.released.size(), 5u + 3 + 3) << "each piece is received or released";
  EXPECT_EQ(events_.take(), (Notes{"answer 1", "request rejected: its call was given up 1", "request 1"}));
  ASSERT_EQ(events_.handlers.requests.size(), 1u);
  EXPECT_EQ(events_.handlers.requests[0].from, &other_);
}

TEST_F(ReceiverTest, CancelGivesUpARequestThatHasNotBeenStartedYet) {
  start(announced(Kind::kRequest, 1, 1, 10));
  receiver_.cancel(connections_.of(peer_), 1);
  startDeferred();
  EXPECT_EQ(transport_.begun, 0u);
  EXPECT_EQ(transport_.released.size(), 1u);
  EXPECT_EQ(events_.take(), Notes{"request rejected: its call was given up 1"});
}

TEST_F(ReceiverTest, FailedPieceFailsItsMessageOnceItsOtherReceivesEnd) {
  start(announced(Kind::kRequest, 1, 5, 10));
  startDeferred();
  complete({ErrorCode::kPeerFailed, "broken"});
  EXPECT_TRUE(events_.buffer.isEmpty());
  EXPECT_EQ(transport_.released.size(), 5 - kInFlightAtOnce);
  complete();
  EXPECT_EQ(events_.take(), Notes{"request rejected: broken 1"});
}

TEST_F(ReceiverTest, MessagesOfAPeerThatIsGoneGiveTheirShareBackAtOnce) {
  start(announced(Kind::kRequest, 1, 5, 10));
  startDeferred();
  start(announced(Kind::kResponse, 2, 1, 20)); // this one has not begun
  receiver_.dropPeer(connections_.of(peer_));
  EXPECT_EQ(window_->receivingMessages.load(), 0u);
  EXPECT_EQ(
      events_.take(),
      (Notes{
          "request rejected: " + peer_.describe() + " is gone 1",
          "answer rejected: " + peer_.describe() + " is gone 2"}));
  EXPECT_EQ(window_->inUseBytes(), 0u) << "the share does not wait for the transport";
  EXPECT_EQ(transport_.asked.size(), kInFlightAtOnce);
  startDeferred();
  EXPECT_EQ(transport_.released.size(), 5 - kInFlightAtOnce + 1);
  EXPECT_GT(HostPool::instance().statistics().inUseBytes, poolBytesAtStart_) << "its memory stays until then";
  completeAll();
  EXPECT_EQ(events_.take(), Notes{}) << "they have been reported once";
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, poolBytesAtStart_);
}

TEST_F(ReceiverTest, ClosingRejectsUnrequestedMessages) {
  start(announced(Kind::kRequest, 1, 5, 10));
  startDeferred();
  start(announced(Kind::kRequest, 2, 1, 20));
  receiver_.close();
  EXPECT_EQ(events_.take(), Notes{"request rejected: RPC has been shut down on this worker 2"});
  while (!transport_.asked.empty()) {
    transport_.complete({ErrorCode::kCanceled, "closed"});
  }
  EXPECT_EQ(events_.take(), Notes{"request rejected: RPC has been shut down on this worker 1"});
  EXPECT_EQ(transport_.begun, kInFlightAtOnce);
}

} // namespace
} // namespace torch_ucx_rpc
