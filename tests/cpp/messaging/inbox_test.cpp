// How large messages are received, piece by piece, and frames refused.

#include "messaging/inbox.h"

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

// Receives when the test says so.
class PatientTransport final : public Transport {
 public:
  struct Receive {
    void* parked;
    void* into;
    uint64_t bytes;
    OperationDone done;
  };

  void setListener(TransportListener* /*listener*/) override {}
  const std::string& address() const override {
    return address_;
  }
  int eventFd() const override {
    return -1;
  }
  std::vector<std::pair<std::string, std::string>> description() const override {
    return {};
  }
  Error connect(const std::string& /*address*/, EndpointId& /*endpoint*/) override {
    return {};
  }
  void send(
      EndpointId /*endpoint*/,
      const wire::Header& /*header*/,
      std::span<const std::byte> /*bytes*/,
      SendMode /*mode*/,
      OperationDone done,
      Memory /*memory*/) override {
    done({});
  }
  void receive(void* parked, void* into, uint64_t bytes, OperationDone done, Memory /*memory*/) override {
    asked.push_back({parked, into, bytes, std::move(done)});
    ++begun;
    if (isImmediate) {
      complete();
    }
  }
  bool canShare(const void* /*deviceMemory*/) const override {
    return true;
  }
  void refuse(void* parked) override {
    EXPECT_TRUE(refused.insert(parked).second) << "refused twice";
  }
  unsigned progress() override {
    return 0;
  }
  bool arm() override {
    return true;
  }
  size_t operationsInFlight() const override {
    return asked.size();
  }
  std::vector<std::string> lanes(EndpointId /*endpoint*/) const override {
    return {};
  }
  bool repair() override {
    return true;
  }
  void abandon(EndpointId /*endpoint*/) override {}
  void close(int64_t /*limitMs*/) override {}

  // The first of those asked for. Its bytes are the number that it is parked under.
  void complete(Error error = {}) {
    Receive first = std::move(asked.front());
    asked.pop_front();
    std::memset(first.into, static_cast<int>(reinterpret_cast<uintptr_t>(first.parked)), first.bytes);
    first.done(std::move(error));
  }

  bool isImmediate = false;
  size_t begun = 0;
  std::deque<Receive> asked;
  std::set<void*> refused;

 private:
  const std::string address_ = "patient";
};

class InboxTest : public testing::Test {
 protected:
  static constexpr uint64_t kSession = 100; // ours
  static constexpr size_t kAskedAtOnce = Receiver::kAskedBytes / kPiece;

  InboxTest() {
    for (worker_id_t rank = 1; rank <= 2; ++rank) {
      Member member;
      member.rank = rank;
      member.name = "w" + std::to_string(rank);
      member.session = kSession + static_cast<uint64_t>(rank);
      directory_.add(member);
    }
  }

  // A message of one span, of which body and pieces are announced; pieces are parked under the numbers that follow `firstNumber`.
  void announce(
      worker_id_t rank,
      uint64_t callId,
      uint64_t bytes,
      uintptr_t firstNumber,
      wire::Kind kind = wire::Kind::kRequest) {
    OutgoingMessage message;
    const std::span<const std::byte> memory(static_cast<const std::byte*>(nullptr), bytes);
    message.spans.push_back({memory});
    message.address(kind, kSession + static_cast<uint64_t>(rank), rank, kSession, callId);
    for (const OutgoingMessage::Piece& piece : message.pieces) {
      inbox_.onParked(
          std::as_bytes(std::span(&piece.header, 1)), reinterpret_cast<void*>(firstNumber++), piece.bytes.size());
    }
    const Bytes body(std::as_bytes(std::span("body", 4)));
    inbox_.onEager(std::as_bytes(std::span(&message.header, 1)), body);
  }

  void complete(Error error = {}) {
    transport_.complete(std::move(error));
    inbox_.settle();
  }

  Peer& peer(worker_id_t rank) {
    return directory_.at(rank);
  }

  PatientTransport transport_;
  Directory directory_;
  Deliveries deliveries_;
  Outbox outbox_{transport_, deliveries_};
  Devices devices_;
  uint64_t forgotten_ = 0; // the call whose answer is not awaited
  const std::shared_ptr<ReceiveWindow> window_ = std::make_shared<ReceiveWindow>(1ull << 30, [] {});
  Inbox inbox_{
      transport_,
      directory_,
      outbox_,
      window_,
      HostPool::instance(),
      kSession,
      [this](const Peer& /*from*/, uint64_t callId) { return callId != forgotten_; },
      [this]() -> const Devices& { return devices_; },
      deliveries_};
};

TEST_F(InboxTest, ALargeSpanIsReceivedAFewPiecesAtATime) {
  announce(1, 1, 9 * kPiece + 5, 1);
  inbox_.settle();
  for (size_t received = 0; received < 10; ++received) {
    ASSERT_TRUE(deliveries_.empty()) << received;
    EXPECT_EQ(transport_.begun, std::min<size_t>(10, received + kAskedAtOnce));
    peer(1).silence.isBroken = false;
    complete();
    EXPECT_TRUE(peer(1).silence.isBroken) << "each piece is a sign of life";
  }
  ASSERT_EQ(deliveries_.messages.size(), 1u);
  const std::vector<IncomingMessage::Span>& spans = deliveries_.messages[0].spans;
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].bytes, 9 * kPiece + 5);
  const auto* bytes = static_cast<const unsigned char*>(spans[0].data.get());
  for (uint64_t offset = 0; offset < spans[0].bytes; ++offset) {
    ASSERT_EQ(bytes[offset], 1 + offset / kPiece) << offset;
  }
}

TEST_F(InboxTest, MessagesOfAPeerTakeTurns) {
  announce(1, 1, 8 * kPiece, 1);
  inbox_.settle();
  std::this_thread::sleep_for(2 * Receiver::kSlow); // it is slow: the next one does not wait for all of it
  announce(1, 2, 100'000, 50);
  inbox_.settle();
  EXPECT_EQ(transport_.begun, kAskedAtOnce);
  complete();
  complete();
  complete();
  EXPECT_TRUE(deliveries_.empty());
  complete();
  ASSERT_EQ(deliveries_.messages.size(), 1u) << "after what had been asked for, and one piece in between";
  EXPECT_EQ(deliveries_.messages[0].header.callId, 2u);
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(deliveries_.messages.size(), 2u);
}

TEST_F(InboxTest, LargeMessagesDoNotKeepEachOtherFromBeingFinished) {
  announce(1, 1, 6 * kPiece, 1, wire::Kind::kResponse);
  inbox_.settle();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  announce(1, 2, 6 * kPiece, 50, wire::Kind::kResponse);
  for (int received = 0; received < 6; ++received) {
    complete();
  }
  ASSERT_EQ(deliveries_.messages.size(), 1u);
  EXPECT_EQ(deliveries_.messages[0].header.callId, 1u);
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(deliveries_.messages.size(), 2u);
}

TEST_F(InboxTest, TheRestOfWhatIsGivenUpIsRefused) {
  announce(1, 1, 8 * kPiece, 1);
  announce(2, 2, 8 * kPiece, 50, wire::Kind::kResponse);
  inbox_.settle();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  inbox_.settle();
  EXPECT_EQ(transport_.begun, 2 * kAskedAtOnce);
  wire::Header cancel;
  cancel.kind = wire::Kind::kCancel;
  cancel.sourceRank = 1;
  cancel.sourceSession = kSession + 1;
  cancel.targetSession = kSession;
  cancel.callId = 1;
  inbox_.onEager(std::as_bytes(std::span(&cancel, 1)), {});
  forgotten_ = 2;
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(transport_.begun, 2 * kAskedAtOnce);
  EXPECT_EQ(transport_.refused.size(), 2 * (8 - kAskedAtOnce));
  EXPECT_EQ(deliveries_.rejections.size(), 2u);
  EXPECT_TRUE(deliveries_.messages.empty());
}

TEST_F(InboxTest, PeersDoNotWaitForOneAnother) {
  announce(1, 1, 8 * kPiece, 1);
  inbox_.settle();
  std::this_thread::sleep_for(2 * Receiver::kSlow);
  announce(2, 1, 100'000, 50);
  inbox_.settle();
  EXPECT_EQ(transport_.begun, kAskedAtOnce + 1);
  while (!transport_.asked.empty()) {
    complete();
  }
}

TEST_F(InboxTest, PiecesThatAreThereAtOnceLeaveRoomForOthers) {
  transport_.isImmediate = true;
  announce(1, 1, 7 * kPiece, 1);
  inbox_.settle();
  for (size_t begun = kAskedAtOnce; begun < 7; begun += kAskedAtOnce) {
    EXPECT_EQ(transport_.begun, begun);
    EXPECT_TRUE(inbox_.isUnsettled());
    EXPECT_TRUE(deliveries_.empty());
    inbox_.settle();
  }
  EXPECT_EQ(transport_.begun, 7u);
  EXPECT_EQ(deliveries_.messages.size(), 1u);
  inbox_.settle();
  EXPECT_FALSE(inbox_.isUnsettled());
}

TEST_F(InboxTest, WhatHasWaitedForAMessageThatIsThereAtOnceIsNotForgotten) {
  transport_.isImmediate = true;
  announce(1, 1, 2 * kPiece, 1);
  announce(1, 2, 2 * kPiece, 50); // waits while the first is being received
  inbox_.settle();
  EXPECT_EQ(deliveries_.messages.size(), 1u);
  EXPECT_TRUE(inbox_.isUnsettled());
  inbox_.settle();
  EXPECT_EQ(deliveries_.messages.size(), 2u);
  EXPECT_FALSE(inbox_.isUnsettled());
}

TEST_F(InboxTest, APieceThatFailsFailsItsMessageAndTheRestIsRefused) {
  announce(1, 1, 8 * kPiece, 1);
  inbox_.settle();
  complete({ErrorCode::kPeerFailed, "broken"});
  EXPECT_TRUE(deliveries_.empty()) << "the transport still writes to its memory";
  EXPECT_EQ(transport_.refused.size(), 8 - kAskedAtOnce);
  while (!transport_.asked.empty()) {
    complete();
  }
  ASSERT_EQ(deliveries_.rejections.size(), 1u);
  EXPECT_EQ(deliveries_.rejections[0].error.message(), "broken");
  EXPECT_EQ(transport_.begun, kAskedAtOnce);
}

TEST_F(InboxTest, TheRestOfAMessageOfAPeerThatIsGoneIsRefused) {
  announce(1, 1, 8 * kPiece, 1);
  announce(2, 1, kPiece, 50);
  inbox_.settle();
  inbox_.dropPeer(peer(1));
  ASSERT_EQ(deliveries_.rejections.size(), 1u);
  inbox_.settle();
  EXPECT_EQ(transport_.refused.size(), 8 - kAskedAtOnce);
  while (!transport_.asked.empty()) {
    complete();
  }
  EXPECT_EQ(deliveries_.rejections.size(), 1u);
  EXPECT_EQ(deliveries_.messages.size(), 1u);
}

TEST_F(InboxTest, FramesThatAreRefusedAreCountedAndToldOfOnceForEachSort) {
  wire::Header stranger;
  stranger.targetSession = kSession;
  stranger.sourceSession = 4711;
  wire::Header other;
  other.targetSession = kSession + 1;
  for (int time = 0; time < 3; ++time) {
    inbox_.onEager(std::as_bytes(std::span(&stranger, 1)), {});
    inbox_.onEager(std::as_bytes(std::span(&other, 1)), {});
  }
  EXPECT_EQ(inbox_.refusedFrames(), 6u);
  const std::string& warning = deliveries_.warning;
  EXPECT_EQ(std::count(warning.begin(), warning.end(), ';'), 1) << warning;
  EXPECT_NE(warning.find("not a worker of this job"), std::string::npos) << warning;
}

TEST_F(InboxTest, WhatIsBeingReceivedFailsWhenItCloses) {
  announce(1, 1, 8 * kPiece, 1);
  inbox_.settle();
  inbox_.close();
  while (!transport_.asked.empty()) {
    transport_.complete({ErrorCode::kCanceled, "closed"});
  }
  ASSERT_EQ(deliveries_.rejections.size(), 1u);
  EXPECT_EQ(deliveries_.rejections[0].error.code(), ErrorCode::kShutDown);
}

} // namespace
} // namespace torch_ucx_rpc
