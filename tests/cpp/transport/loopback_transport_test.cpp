// Faults on demand, which only the loopback network has. The rest is in transport_contract_test.cpp.

#include "loopback_transport.h"

#include "outcome.h"

#include <gtest/gtest.h>

#include <deque>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Fate = LoopbackNetwork::Fate;

class LoopbackTransportTest : public testing::Test, public TransportListener {
 protected:
  void SetUp() override {
    a_ = network_.makeTransport("a");
    b_ = network_.makeTransport("b");
    a_->setListener(this);
    b_->setListener(this);
    ASSERT_FALSE(a_->connect("b", toB_));
    ASSERT_FALSE(b_->connect("a", toA_));
  }

  void onEager(std::span<const std::byte> header, std::span<const std::byte> /*bytes*/) override {
    note(header);
  }
  void onRendezvous(std::span<const std::byte> header, void* rendezvous, uint64_t /*bytes*/) override {
    note(header);
    rendezvous_.push_back(rendezvous);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {
    ++failures_;
  }

  const Outcome& send(uint64_t callId, SendMode mode = SendMode::kEager) {
    wire::Header& header = headers_.emplace_back();
    header.callId = callId;
    Outcome& outcome = outcomes_.emplace_back();
    a_->send(toB_, header, bytes_, mode, outcome.callback());
    return outcome;
  }

  const Bytes bytes_ = Bytes(100);
  std::deque<wire::Header> headers_;
  std::deque<Outcome> outcomes_;
  std::vector<uint64_t> arrived_; // call ids
  std::vector<void*> rendezvous_;
  int failures_ = 0;
  LoopbackNetwork network_;
  std::unique_ptr<Transport> a_;
  std::unique_ptr<Transport> b_;
  EndpointId toA_ = 0;
  EndpointId toB_ = 0;

 private:
  void note(std::span<const std::byte> bytes) {
    wire::Header header;
    EXPECT_FALSE(wire::readHeader(bytes, header));
    arrived_.push_back(header.callId);
  }
};

TEST_F(LoopbackTransportTest, DroppedMessageIsSentAndNeverArrives) {
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kDrop; });
  const Outcome& eager = send(1);
  const Outcome& rendezvous = send(2, SendMode::kRendezvous);
  b_->progress();
  EXPECT_TRUE(arrived_.empty());
  EXPECT_TRUE(eager.isDone());
  EXPECT_FALSE(eager.error());
  EXPECT_FALSE(rendezvous.isDone());
}

TEST_F(LoopbackTransportTest, HeldMessagesArriveLatestFirst) {
  network_.setFault(
      [](const wire::Header& header, SendMode /*mode*/) { return header.callId < 3 ? Fate::kHold : Fate::kDeliver; });
  send(1);
  send(2);
  send(3);
  b_->progress();
  EXPECT_EQ(arrived_, std::vector<uint64_t>{3});
  network_.releaseHeld();
  b_->progress();
  EXPECT_EQ(arrived_, (std::vector<uint64_t>{3, 2, 1}));
}

TEST_F(LoopbackTransportTest, DuplicatedRendezvousCompletesOnce) {
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kDuplicate; });
  send(1);
  const Outcome& rendezvous = send(2, SendMode::kRendezvous);
  b_->progress();
  EXPECT_EQ(arrived_, (std::vector<uint64_t>{1, 1, 2, 2}));
  for (void* handle : rendezvous_) {
    b_->release(handle);
  }
  a_->progress();
  EXPECT_TRUE(rendezvous.isDone());
}

TEST_F(LoopbackTransportTest, FailedSendIsReportedAtOnce) {
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kFail; });
  for (const SendMode mode : {SendMode::kEager, SendMode::kRendezvous}) {
    EXPECT_EQ(send(1, mode).error().code(), ErrorCode::kPeerFailed);
  }
  b_->progress();
  EXPECT_TRUE(arrived_.empty());
}

TEST_F(LoopbackTransportTest, NothingComesFromAKilledTransport) {
  send(1);
  network_.kill("a");
  send(2);
  send(3, SendMode::kRendezvous);
  b_->progress();
  for (const uint64_t callId : arrived_) {
    EXPECT_EQ(callId, 1u) << "sent after the death of its sender";
  }
  EXPECT_EQ(failures_, 1);
}

TEST_F(LoopbackTransportTest, BytesOfASenderThatIsGoneAreNotRead) {
  Outcome received;
  send(1, SendMode::kRendezvous);
  b_->progress();
  ASSERT_EQ(rendezvous_.size(), 1u);
  a_.reset();
  Bytes into(100);
  b_->receive(rendezvous_[0], into.data(), into.size(), received.callback());
  EXPECT_TRUE(received.error());
}

} // namespace
} // namespace torch_ucx_rpc
