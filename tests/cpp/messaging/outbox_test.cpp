// Messages leave in parts, a few at a time. Each message ends exactly once.

#include "messaging/outbox.h"

#include "assume_worker_lock.h"
#include "event_log.h"
#include "sending_transport.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using wire::Kind;

class OutboxTest : public testing::Test {
 protected:
  static constexpr size_t kMost = PushShare::kMaxParts;
  static constexpr size_t kLarge = OutgoingMessage::kEagerBodyBytes + 1;

  ~OutboxTest() override {
    outbox_.close();
    transport_.close(0);
    (void)events_.take();
    EXPECT_EQ(destroyed_.load(), made_) << "messages that have not ended";
  }

  std::unique_ptr<OutgoingMessage> message(
      Kind kind, uint64_t callId, size_t bodyBytes = 1, std::span<const std::byte> span = {}, Peer* to = nullptr) {
    ++made_;
    std::unique_ptr<OutgoingMessage> made = makeOutgoing(bodyBytes, span, std::make_unique<CountingLender>(destroyed_));
    made->to = to != nullptr ? to : &peer_;
    made->address(kind, 100, 0, made->to->member().session, callId);
    return made;
  }
  void send(Kind kind, uint64_t callId, size_t bodyBytes = 1, Peer* to = nullptr) {
    outbox_.send(message(kind, callId, bodyBytes, {}, to));
  }
  void askToAdmit(Peer& peer) {
    peer.hasAdmitted.store(false);
    send(Kind::kJoin, 0, 1, &peer);
  }
  // Sends a body that waits at the sender until the peer fetches it.
  void sendLarge(Kind kind, uint64_t callId, Peer* to = nullptr) {
    send(kind, callId, kLarge, to);
  }
  // Sends as many bodies by rendezvous as may be in flight.
  void fill(Kind kind, uint64_t firstCall) {
    for (uint64_t call = 0; call < kMost; ++call) {
      sendLarge(kind, firstCall + call);
    }
    ASSERT_EQ(transport_.begun, kMost);
  }
  void finish(Error error = {}, size_t index = 0) {
    transport_.finish(std::move(error), index);
    startDeferred();
  }

  void startDeferred() {
    connections_.forEachReady([this](Connection& connection) { outbox_.startDeferred(connection); });
  }

  using Notes = std::vector<std::string>;
  using Calls = std::vector<uint64_t>;

  std::atomic<int> destroyed_{0};
  int made_ = 0;
  Peer peer_{memberOf(1)};
  Peer other_{memberOf(2)};
  const AssumeWorkerLock lock_;
  SendingTransport transport_;
  EventLog events_;
  PushShare share_;
  const Identity self_{0, "w0", 100};
  Connections connections_;
  Outbox outbox_{transport_, self_, connections_, share_, events_.buffer};
};

TEST_F(OutboxTest, EndpointIsMadeWithTheFirstMessageToAPeer) {
  EXPECT_FALSE(connections_.of(peer_).endpoint().has_value());
  EXPECT_EQ(connections_.find(0), nullptr);
  send(Kind::kRequest, 1);
  send(Kind::kRequest, 2);
  send(Kind::kRequest, 3, 1, &other_);
  EXPECT_EQ(transport_.connected, (std::vector<std::string>{"address 1", "address 2"}));
  EXPECT_EQ(connections_.find(*connections_.of(peer_).endpoint()), &connections_.of(peer_));
  EXPECT_EQ(connections_.find(*connections_.of(other_).endpoint()), &connections_.of(other_));
  EXPECT_EQ(connections_.find(7), nullptr);
}

TEST_F(OutboxTest, StuckMessagesTakeNoRoomOverTheNetwork) {
  fill(Kind::kRequest, 0);
  sendLarge(Kind::kRequest, kMost);
  const size_t stuck = transport_.sent.size();
  EXPECT_FALSE(outbox_.moveToNetwork(connections_.of(peer_)));
  startDeferred();
  EXPECT_EQ(transport_.connected, (std::vector<std::string>{"address 1", "address 1 over the network"}));
  EXPECT_TRUE(peer_.isOverNetwork.load());
  ASSERT_EQ(transport_.sent.size(), stuck + 1);
  EXPECT_EQ(transport_.sent.back().endpoint, 1u);
  EXPECT_EQ(connections_.find(0), &connections_.of(peer_));
  EXPECT_EQ(connections_.find(1), &connections_.of(peer_));
  EXPECT_EQ(outbox_.underWay(), kMost + 1);
  // A stuck message may still arrive late, and ends once.
  finish();
  EXPECT_EQ(outbox_.underWay(), kMost);
  EXPECT_FALSE(outbox_.moveToNetwork(connections_.of(peer_)));
  EXPECT_EQ(transport_.connected.size(), 2u) << "it has moved already";
  outbox_.abandon(peer_);
  EXPECT_EQ(transport_.abandoned, (std::vector<EndpointId>{1, 0}));
}

TEST_F(OutboxTest, PeerThatTheNetworkDoesNotReachStaysWhereItIs) {
  send(Kind::kRequest, 1);
  transport_.networkError = {ErrorCode::kPeerFailed, "no such transport"};
  EXPECT_TRUE(outbox_.moveToNetwork(connections_.of(peer_)));
  EXPECT_FALSE(peer_.isOverNetwork.load());
  send(Kind::kRequest, 2);
  EXPECT_EQ(transport_.sent.back().endpoint, 0u);
}

TEST_F(OutboxTest, OneActiveMessageForTheBodyAndOneForEachPieceOfASpan) {
  const Bytes span(2 * OutgoingMessage::kPieceBytes + 5);
  outbox_.send(message(Kind::kRequest, 1, 10, span));
  ASSERT_EQ(transport_.sent.size(), 4u);
  uint64_t offset = 0;
  for (size_t piece = 0; piece < 3; ++piece) {
    EXPECT_EQ(transport_.sent[piece].mode, SendMode::kRendezvous);
    EXPECT_EQ(transport_.sent[piece].header.index, 0u);
    EXPECT_EQ(transport_.sent[piece].header.place.offset, offset);
    offset += transport_.sent[piece].bytes;
  }
  EXPECT_EQ(offset, span.size());
  EXPECT_EQ(transport_.sent[3].mode, SendMode::kEager);
  EXPECT_EQ(transport_.sent[3].header.index, wire::kBodyIndex);
  EXPECT_EQ(transport_.sent[3].header.spanCount, 1u);
  EXPECT_EQ(peer_.bytesSent.load(), 10 + span.size());
}

TEST(OutgoingMessageTest, ASpanOfAnySizeHasAtMostAsManyPiecesAsAllowed) {
  constexpr size_t kMostUsual = OutgoingMessage::kMaxPieces * OutgoingMessage::kPieceBytes;
  const std::byte first{};
  for (const size_t bytes : {size_t{1}, kMostUsual, kMostUsual + 1, 2 * kMostUsual, 2 * kMostUsual + 1}) {
    OutgoingMessage message;
    message.spans.push_back({{&first, bytes}}); // address() does not read the bytes
    message.address(Kind::kRequest, 100, 0, 101, 1);
    EXPECT_LE(message.pieces.size(), OutgoingMessage::kMaxPieces) << bytes << " bytes";
    EXPECT_EQ(message.pieces.back().header.place.offset + message.pieces.back().bytes.size(), bytes);
  }
}

TEST_F(OutboxTest, BodyIsEagerUpToItsLimitUnlessItWaitsForRoom) {
  send(Kind::kRequest, 1, OutgoingMessage::kEagerBodyBytes);
  send(Kind::kRequest, 2, OutgoingMessage::kEagerBodyBytes + 1);
  std::unique_ptr<OutgoingMessage> waiting = message(Kind::kRequest, 3);
  waiting->waitsForRoom = true;
  outbox_.send(std::move(waiting));
  ASSERT_EQ(transport_.sent.size(), 3u);
  EXPECT_EQ(transport_.sent[0].mode, SendMode::kEager);
  EXPECT_EQ(transport_.sent[1].mode, SendMode::kRendezvous);
  EXPECT_EQ(transport_.sent[2].mode, SendMode::kRendezvous);
}

TEST_F(OutboxTest, MessageEndsOnceWhenItsLastPartIsThrough) {
  const Bytes span(100'000);
  outbox_.send(message(Kind::kRequest, 1, 1, span));
  EXPECT_EQ(connections_.of(peer_).outgoing.underWay, 1u);
  finish({}, 1);
  EXPECT_TRUE(events_.buffer.isEmpty()) << "a piece is still under way";
  EXPECT_FALSE(connections_.of(peer_).silence.heardSinceCheck);
  finish();
  EXPECT_TRUE(connections_.of(peer_).silence.heardSinceCheck) << "the peer has fetched a piece";
  EXPECT_EQ(connections_.of(peer_).outgoing.underWay, 0u);
  EXPECT_EQ(events_.take(), Notes{}) << "an end in order is no event";
  EXPECT_EQ(destroyed_.load(), 1);
}

TEST_F(OutboxTest, FirstFailureOfAPartIsReportedAfterTheLastPart) {
  const Bytes span(100'000);
  outbox_.send(message(Kind::kRequest, 4, 1, span));
  finish({ErrorCode::kPeerFailed, "first"});
  EXPECT_TRUE(events_.buffer.isEmpty()) << "the transport still reads its memory";
  EXPECT_EQ(destroyed_.load(), 0);
  finish({ErrorCode::kPeerFailed, "second"});
  EXPECT_EQ(events_.take(), Notes{"request not sent: first 4"});
  EXPECT_FALSE(connections_.of(peer_).silence.heardSinceCheck);
}

// Otherwise the callee would keep the announced part, and wait for the others.
TEST_F(OutboxTest, RequestThatHasLeftInPartIsCanceledAtItsCallee) {
  const Bytes span(2 * OutgoingMessage::kPieceBytes);
  transport_.sendErrors[1] = {ErrorCode::kOutOfMemory, "no memory"};
  outbox_.send(message(Kind::kRequest, 4, 1, span));
  EXPECT_EQ(transport_.begun, 2u) << "the body does not leave after the error";
  startDeferred();
  ASSERT_EQ(transport_.sent.size(), 2u);
  EXPECT_EQ(transport_.sent[1].header.kind, Kind::kCancel);
  EXPECT_EQ(transport_.sent[1].header.callId, 4u);
  EXPECT_EQ(transport_.sent[1].header.targetSession, peer_.member().session);
  EXPECT_TRUE(events_.buffer.isEmpty()) << "the transport still reads its memory";
  finish();
  EXPECT_EQ(events_.take(), Notes{"request not sent: no memory 4"});
}

TEST_F(OutboxTest, RequestIsCanceledWhenAPartFailsLater) {
  const Bytes span(100'000);
  outbox_.send(message(Kind::kRequest, 4, 1, span));
  finish({ErrorCode::kOutOfMemory, "no memory"});
  EXPECT_EQ(transport_.sent.back().header.kind, Kind::kCancel);
  finish({ErrorCode::kOutOfMemory, "no memory either"});
  EXPECT_EQ(transport_.callsUnderWay(), Calls{4}) << "it is canceled once";
}

TEST_F(OutboxTest, FailureOfAPartlySentAnswerIsReportedAtOnceAndOnce) {
  const Bytes span(2 * OutgoingMessage::kPieceBytes);
  transport_.sendErrors[1] = {ErrorCode::kOutOfMemory, "no memory"};
  outbox_.send(message(Kind::kResponse, 4, 1, span));
  startDeferred();
  EXPECT_EQ(transport_.sent.size(), 1u);
  EXPECT_EQ(events_.take(), Notes{"answer cut: no memory 4"}) << "or its caller would never release the first part";
  finish();
  EXPECT_EQ(events_.take(), Notes{});
  EXPECT_FALSE(outbox_.hasStranded()) << "its caller has a part of it";
}

TEST_F(OutboxTest, AnswerWhoseFirstPartFailsHasNotLeftAndIsSentAgain) {
  const Bytes span(100'000);
  transport_.sendErrors[0] = {ErrorCode::kOutOfFiles, "no files left"};
  outbox_.send(message(Kind::kResponse, 4, 1, span));
  EXPECT_TRUE(transport_.sent.empty());
  EXPECT_TRUE(outbox_.hasStranded());
  outbox_.retryStranded();
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{4, 4}));
}

TEST_F(OutboxTest, PartsLostWithTheirReceiverCauseNoEvent) {
  const Bytes span(100'000);
  outbox_.send(message(Kind::kRequest, 4, 1, span));
  outbox_.send(message(Kind::kResponse, 5, 1, span));
  ASSERT_TRUE(peer_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  for (int part = 0; part < 4; ++part) {
    finish({ErrorCode::kPeerFailed, "it died"});
  }
  EXPECT_TRUE(transport_.sent.empty());
  EXPECT_EQ(events_.take(), Notes{"request not sent: it died 4"});
}

TEST_F(OutboxTest, LocalErrorFailsRequestsAndStrandsTheRest) {
  transport_.connectError = {ErrorCode::kOutOfFiles, "no files left"};
  send(Kind::kRequest, 1);
  send(Kind::kResponse, 2);
  sendLarge(Kind::kRequest, 3);
  send(Kind::kPing, 0);
  EXPECT_EQ(events_.take(), (Notes{"request not sent: no files left 1", "request not sent: no files left 3"}));
  EXPECT_TRUE(outbox_.hasStranded());
  EXPECT_NE(outbox_.describeStranded().find("no files left"), std::string::npos);
  outbox_.retryStranded();
  EXPECT_TRUE(outbox_.hasStranded()) << "the error is still there";
  transport_.connectError = {};
  send(Kind::kRequest, 5);
  EXPECT_EQ(transport_.callsUnderWay(), Calls{5}) << "the next one tries again";
  outbox_.retryStranded();
  EXPECT_FALSE(outbox_.hasStranded());
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{5, 2, 0}));
}

TEST_F(OutboxTest, ErrorOfThePeerFailsEverything) {
  transport_.connectError = {ErrorCode::kPeerFailed, "nobody there"};
  send(Kind::kRequest, 1);
  send(Kind::kResponse, 2);
  send(Kind::kPing, 0);
  EXPECT_EQ(
      events_.take(),
      (Notes{
          "request not sent: nobody there 1", "answer not sent: nobody there 2", "control not sent: nobody there 1"}));
  EXPECT_FALSE(outbox_.hasStranded());
}

TEST_F(OutboxTest, MessageToAPeerThatIsGoneFailsWithTheReasonOfItsEnd) {
  ASSERT_TRUE(peer_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  send(Kind::kRequest, 1);
  sendLarge(Kind::kRequest, 2);
  EXPECT_EQ(events_.take(), (Notes{"request not sent: it died 1", "request not sent: it died 2"}));
  EXPECT_TRUE(transport_.connected.empty());
}

// The goodbye was submitted before the loss, but another thread had the worker lock.
TEST_F(OutboxTest, GoodbyeLeavesAfterItsPeerHasBeenLost) {
  ASSERT_TRUE(peer_.moveTo(Peer::State::kLeft, {ErrorCode::kShutDown, "it has left the group"}));
  send(Kind::kGoodbye, 0);
  ASSERT_EQ(transport_.sent.size(), 1u);
  EXPECT_EQ(transport_.sent[0].header.kind, Kind::kGoodbye);
}

TEST_F(OutboxTest, PeerThatIsLeavingStillGetsMessages) {
  ASSERT_TRUE(peer_.moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, "it leaves"}));
  send(Kind::kResponse, 1);
  EXPECT_EQ(transport_.callsUnderWay(), Calls{1});
}

TEST_F(OutboxTest, RendezvousLeaveAFewAtATimeInTheOrderOfTheirCalls) {
  fill(Kind::kRequest, 100);
  for (const uint64_t call : {203, 201, 202}) {
    sendLarge(Kind::kRequest, call);
  }
  EXPECT_EQ(transport_.begun, kMost);
  EXPECT_EQ(outbox_.underWay(), kMost + 3) << "including those whose turn has not come";
  transport_.finish();
  EXPECT_EQ(transport_.begun, kMost) << "not inside a transport callback";
  startDeferred();
  EXPECT_EQ(transport_.sent.back().header.callId, 201u);
  finish();
  EXPECT_EQ(transport_.sent.back().header.callId, 202u);
  finish();
  EXPECT_EQ(transport_.sent.back().header.callId, 203u);
  EXPECT_EQ(transport_.sent.size(), kMost);
}

TEST_F(OutboxTest, EagerMessagesPassWaitingOnes) {
  fill(Kind::kRequest, 100);
  sendLarge(Kind::kRequest, 200);
  send(Kind::kRequest, 201);
  EXPECT_EQ(transport_.sent.back().header.callId, 201u);
}

TEST_F(OutboxTest, AnswersDoNotWaitForRequestsNorOnePeerForAnother) {
  fill(Kind::kRequest, 100);
  sendLarge(Kind::kResponse, 200);
  EXPECT_EQ(transport_.sent.back().header.callId, 200u);
  sendLarge(Kind::kRequest, 201, &other_);
  EXPECT_EQ(transport_.sent.back().header.callId, 201u);
  EXPECT_EQ(transport_.sent.back().endpoint, *connections_.of(other_).endpoint());
}

TEST_F(OutboxTest, MessageWithMorePartsThanTheLimitIsSentByItself) {
  sendLarge(Kind::kRequest, 1);
  const Bytes memory(1);
  std::unique_ptr<OutgoingMessage> large = message(Kind::kRequest, 2);
  large->spans.assign(kMost + 1, {memory});
  large->pieces.clear();
  large->address(Kind::kRequest, 100, 0, peer_.member().session, 2);
  outbox_.send(std::move(large));
  sendLarge(Kind::kRequest, 3);
  EXPECT_EQ(transport_.callsUnderWay(), Calls{1});
  finish();
  EXPECT_EQ(transport_.callsUnderWay(), Calls(kMost + 2, 2)) << "its spans and its body";
  while (transport_.sent.front().header.callId == 2) {
    finish();
  }
  EXPECT_EQ(transport_.callsUnderWay(), Calls{3});
}

TEST_F(OutboxTest, RequestThatHasNotLeftCanBeGivenUp) {
  fill(Kind::kRequest, 100);
  sendLarge(Kind::kRequest, 200);
  sendLarge(Kind::kRequest, 201);
  EXPECT_TRUE(outbox_.cancel(peer_, 200));
  EXPECT_EQ(events_.take(), Notes{"request not sent: its call was given up 200"});
  EXPECT_FALSE(outbox_.cancel(peer_, 200)) << "once";
  EXPECT_FALSE(outbox_.cancel(peer_, 100)) << "it has left";
  EXPECT_FALSE(outbox_.cancel(other_, 201)) << "another peer's";
  EXPECT_EQ(outbox_.underWay(), kMost + 1);
  finish();
  EXPECT_EQ(transport_.sent.back().header.callId, 201u);
}

TEST_F(OutboxTest, RequestThatWaitsToBeAdmittedCanBeGivenUp) {
  askToAdmit(peer_);
  send(Kind::kRequest, 1);
  send(Kind::kRequest, 2);
  EXPECT_TRUE(outbox_.cancel(peer_, 1));
  EXPECT_EQ(events_.take(), Notes{"request not sent: its call was given up 1"});
  outbox_.onAdmitted(peer_);
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{0, 2}));
  EXPECT_EQ(outbox_.underWay(), 2u);
}

TEST_F(OutboxTest, AnswersAndPutsAreNotGivenUpWithACall) {
  for (const Kind kind : {Kind::kResponse, Kind::kPut}) {
    for (uint64_t call = 0; call <= kMost; ++call) {
      sendLarge(kind, call);
    }
    EXPECT_FALSE(outbox_.cancel(peer_, kMost));
  }
  EXPECT_EQ(outbox_.underWay(), 2 * (kMost + 1));
}

TEST_F(OutboxTest, PeerThatIsAskedToAdmitUsGetsNothingElseUntilItHas) {
  askToAdmit(peer_);
  EXPECT_EQ(transport_.sent.back().header.kind, Kind::kJoin);
  send(Kind::kRequest, 1);
  sendLarge(Kind::kRequest, 2);
  send(Kind::kRequest, 3, 1, &other_);
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{0, 3})) << "another peer does not wait";
  outbox_.onAdmitted(peer_);
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{0, 3, 1, 2})) << "in the order in which they were sent";
  outbox_.onAdmitted(peer_);
  send(Kind::kRequest, 4);
  EXPECT_EQ(transport_.callsUnderWay(), (Calls{0, 3, 1, 2, 4}));
}

TEST_F(OutboxTest, GoodbyeDoesNotWaitToBeAdmitted) {
  askToAdmit(peer_);
  send(Kind::kGoodbye, 0);
  EXPECT_EQ(transport_.sent.back().header.kind, Kind::kGoodbye);
}

TEST_F(OutboxTest, EverythingToAPeerThatIsGoneEnds) {
  fill(Kind::kRequest, 100);
  sendLarge(Kind::kRequest, 200);
  askToAdmit(other_);
  send(Kind::kRequest, 300, 1, &other_);
  (void)events_.take();
  ASSERT_TRUE(peer_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  ASSERT_TRUE(other_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "so did this"}));
  const EndpointId endpoint = *connections_.of(peer_).endpoint();
  const EndpointId others = *connections_.of(other_).endpoint();
  outbox_.abandon(peer_);
  EXPECT_EQ(transport_.abandoned, std::vector<EndpointId>{endpoint});
  EXPECT_EQ(events_.take(), Notes{"request not sent: it died 200"});
  outbox_.abandon(other_);
  EXPECT_EQ(transport_.abandoned, (std::vector<EndpointId>{endpoint, others}));
  EXPECT_EQ(events_.take(), Notes{"request not sent: so did this 300"}) << "it will not be admitted";
  EXPECT_EQ(outbox_.underWay(), 0u) << "messages to peers that are gone do not count";
  EXPECT_EQ(transport_.sent.size(), kMost + 1) << "the transport releases the others when it can";
}

TEST_F(OutboxTest, EverythingFailsOnceItIsClosed) {
  fill(Kind::kRequest, 100);
  sendLarge(Kind::kRequest, 200);
  askToAdmit(other_);
  send(Kind::kRequest, 300, 1, &other_);
  outbox_.close();
  const Notes closed = events_.take();
  EXPECT_EQ(
      closed,
      (Notes{
          "request not sent: RPC has been shut down on this worker 300",
          "request not sent: RPC has been shut down on this worker 200"}));
  const size_t begun = transport_.begun;
  send(Kind::kRequest, 400);
  sendLarge(Kind::kRequest, 401);
  EXPECT_EQ(
      events_.take(),
      (Notes{
          "request not sent: RPC has been shut down on this worker 400",
          "request not sent: RPC has been shut down on this worker 401"}));
  EXPECT_EQ(transport_.begun, begun);
}

} // namespace
} // namespace torch_ucx_rpc
