// Frames of intruders.

#include "agent_fixture.h"

namespace torch_ucx_rpc {
namespace {

// A bare transport, as worker 9 or as no worker, that sends made-up frames.
class AgentIntruderTest : public AgentTest, public TransportListener {
 protected:
  static constexpr worker_id_t kRank = 9;
  static constexpr uint64_t kSession = 4711;

  void SetUp() override {
    AgentTest::SetUp();
    start(2, echoBehindGate());
    transport_ = network_.makeTransport("intruder");
    transport_->setListener(this);
    ASSERT_FALSE(transport_->connect("address 0", toZero_));
  }
  void TearDown() override {
    AgentTest::TearDown();
    transport_.reset();
  }
  void becomeMember() {
    agent(0).group().addMembers({memberOf(kRank, kSession, "intruder")});
  }

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override {
    wire::Header read;
    EXPECT_FALSE(wire::readHeader(header, read));
    replies_.emplace_back(read, Bytes(bytes));
  }
  void onRendezvous(std::span<const std::byte> /*header*/, void* rendezvous, uint64_t /*bytes*/) override {
    transport_->release(rendezvous);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  wire::Header frame(wire::Kind kind, uint64_t callId) {
    wire::Header header;
    header.kind = kind;
    header.sourceRank = kRank;
    header.sourceSession = kSession;
    header.targetSession = agent(0).session();
    header.callId = callId;
    return header;
  }
  const Outcome& send(const wire::Header& header, Bytes bytes, SendMode mode = SendMode::kEager) {
    headers_.push_back(header);
    bytes_.push_back(std::move(bytes));
    Outcome& outcome = outcomes_.emplace_back();
    transport_->send(toZero_, headers_.back(), bytes_.back(), mode, outcome.callback());
    return outcome;
  }
  [[nodiscard]] bool areAllSent() const {
    return std::all_of(outcomes_.begin(), outcomes_.end(), [](const Outcome& each) { return each.isDone(); });
  }
  [[nodiscard]] bool progressUntil(const std::function<bool()>& condition) {
    return eventually([&] {
      transport_->progress();
      return condition();
    });
  }

  // Checks the first reply.
  void expectRefusal(wire::RefusalReason reason, const std::string& sentence) {
    EXPECT_EQ(replies_[0].first.kind, wire::Kind::kRefused);
    wire::Refusal refusal{};
    const Bytes& body = replies_[0].second;
    ASSERT_GE(body.size(), sizeof(refusal));
    std::memcpy(&refusal, body.data(), sizeof(refusal));
    EXPECT_EQ(refusal.reason, reason);
    const std::string text(reinterpret_cast<const char*>(body.data()) + sizeof(refusal), body.size() - sizeof(refusal));
    EXPECT_TRUE(contains(text, sentence)) << text;
  }

  // Lent to the transport, so declared before it.
  std::deque<wire::Header> headers_;
  std::deque<Bytes> bytes_;
  std::deque<Outcome> outcomes_;
  std::unique_ptr<Transport> transport_;
  EndpointId toZero_ = 0;
  std::vector<std::pair<wire::Header, Bytes>> replies_;
};

TEST_F(AgentIntruderTest, FramesFromStrangersAreRefusedAndCounted) {
  const auto body = [] { return wire::BodyWriter(MessageType::PYTHON_CALL).finish(); };
  send(frame(wire::Kind::kRequest, 1), body());
  send(frame(wire::Kind::kRequest, 2), body(), SendMode::kRendezvous);
  send(frame(wire::Kind::kGoodbye, 3), {});
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 3; }));
  EXPECT_TRUE(progressUntil([&] { return areAllSent(); })) << "the rendezvous of a stranger is released";
  becomeMember();
  wire::Header forEarlierLife = frame(wire::Kind::kRequest, 4);
  forEarlierLife.targetSession ^= 1;
  send(forEarlierLife, body());
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 4; }));
  EXPECT_EQ(metric(0, "agent.calls_received"), 0u);
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, MalformedRequestIsAnsweredWithAnError) {
  becomeMember();
  Bytes garbage(100);
  std::memset(garbage.data(), 0xA5, garbage.size());
  send(frame(wire::Kind::kRequest, 1), std::move(garbage));
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty(); }));
  EXPECT_EQ(replies_[0].first.callId, 1u);
  expectRefusal(wire::RefusalReason::kMalformed, "malformed message");
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, AnswerFromAWorkerThatWasNotCalledIsIgnored) {
  becomeMember();
  const Future future = call(0, 1, "block"); // the first call of worker 0: id 0
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  wire::BodyWriter forged(MessageType::PYTHON_RET);
  const std::string text = "forged";
  forged.setInlinePayload(text);
  send(frame(wire::Kind::kResponse, 0), forged.finish());
  EXPECT_EQ(textOf(*answer(call(0, 1, "later"))), "later"); // the forged answer has been handled before this one
  EXPECT_FALSE(future->completed()) << "answered by a worker that was not asked";
  gate_->open();
  EXPECT_EQ(textOf(*answer(future)), "block");
}

TEST_F(AgentIntruderTest, EmptyRendezvousCompletes) {
  becomeMember();
  send(frame(wire::Kind::kRequest, 1), {}, SendMode::kRendezvous);
  EXPECT_TRUE(progressUntil([&] { return areAllSent(); })) << "never released";
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, RequestOfContradictingPartsIsAnsweredAndGivesItsMemoryBack) {
  becomeMember();
  wire::Header header = frame(wire::Kind::kRequest, 1);
  header.spanCount = 3;
  header.index = 0;
  header.place = {0, 500'000};
  send(header, Bytes(500'000), SendMode::kRendezvous);
  header.index = 1;
  send(header, Bytes(500'000), SendMode::kRendezvous);
  header.index = 0;
  send(header, Bytes(500'000), SendMode::kRendezvous); // a second time
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty() && areAllSent(); }));
  EXPECT_EQ(replies_[0].first.callId, 1u);
}

TEST_F(AgentIntruderTest, SpansOfWrongSizesAreAnError) {
  becomeMember();
  wire::BodyWriter writer(MessageType::PYTHON_CALL);
  writer.setPayloadSpan(1'000'000, 0);
  wire::Header header = frame(wire::Kind::kRequest, 1);
  header.spanCount = 1;
  send(header, writer.finish());
  header.index = 0;
  header.place = {0, 500'000};
  send(header, Bytes(500'000), SendMode::kRendezvous); // the body says twice as much
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty() && areAllSent(); }));
  expectRefusal(wire::RefusalReason::kMalformed, "");
  EXPECT_TRUE(eventually([&] { return metric(0, "window.in_use_bytes") == 0; }));
}

} // namespace
} // namespace torch_ucx_rpc
