// Jobs with a secret work as without one, and refuse frames of other senders.

#include "sealed_job.h"

namespace torch_ucx_rpc {
namespace {

TEST_F(SealedAgentTest, MessagesOfEverySizeAndShapeArrive) {
  start(2);
  EXPECT_EQ(textOf(*answer(call(0, 1, "small"))), "small");
  EXPECT_TRUE(isAll(answer(call(0, 1, "inline", {tensorOf(kKiB, 2)}))->tensors()[0], 2));
  EXPECT_TRUE(isAll(answer(call(0, 1, "span", {tensorOf(kMiB, 3)}))->tensors()[0], 3));

  const std::string payload(3 * kMiB, 'p'); // it is a span
  const auto both = answer(call(0, 1, payload, {tensorOf(kMiB, 4)}));
  EXPECT_EQ(textOf(*both), payload);
  EXPECT_TRUE(isAll(both->tensors()[0], 4));

  std::vector<at::Tensor> many; // makes the body too large to be eager
  for (int number = 0; number < 30; ++number) {
    many.push_back(tensorOf(20 * kKiB, number));
  }
  const auto answered = answer(call(0, 1, payload, many));
  EXPECT_EQ(textOf(*answered), payload);
  for (int number = 0; number < 30; ++number) {
    EXPECT_TRUE(isAll(answered->tensors()[number], number));
  }
  EXPECT_EQ(metric(0, "agent.frames_refused") + metric(1, "agent.frames_refused"), 0u);
}

TEST_F(SealedAgentTest, FramesMayOvertakeEachOther) {
  start(2);
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.kind == wire::Kind::kRequest ? Fate::kHold : Fate::kDeliver;
  });
  std::vector<Future> futures;
  for (int number = 0; number < 200; ++number) {
    futures.push_back(call(0, 1, std::to_string(number), {tensorOf(kMiB / 4, number)}));
  }
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.client_active_calls") == 200; }));
  network_.setFault({});
  network_.releaseHeld(); // the latest first
  for (int number = 0; number < 200; ++number) {
    const auto answered = answer(futures[number]);
    EXPECT_EQ(textOf(*answered), std::to_string(number));
    EXPECT_TRUE(isAll(answered->tensors()[0], number));
  }
  EXPECT_EQ(metric(1, "agent.frames_refused"), 0u);
}

TEST_F(SealedAgentTest, AFrameThatComesTwiceIsTakenOnce) {
  std::atomic<int> handled{0};
  AgentOptions options;
  options.heartbeatLimit = milliseconds(0); // the count would include heartbeats
  start(
      2,
      [&](Message& request) {
        handled.fetch_add(1);
        return echo(request);
      },
      options);
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kDuplicate; });
  for (int number = 0; number < 20; ++number) {
    EXPECT_EQ(textOf(*answer(call(0, 1, std::to_string(number)))), std::to_string(number));
  }
  EXPECT_TRUE(eventually([&] { return metric(1, "agent.frames_refused") == 20; }));
  EXPECT_EQ(handled.load(), 20);
}

TEST_F(SealedAgentTest, ManyThreadsCallOnePeer) {
  start(2);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([this, thread] {
      for (int number = 0; number < 100; ++number) {
        const std::string text = std::to_string(1000 * thread + number);
        EXPECT_EQ(textOf(*answer(call(0, 1, text))), text);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(metric(0, "agent.frames_refused") + metric(1, "agent.frames_refused"), 0u);
}

// An intruder on the network that knows worker 0's address and session, and worker 1's identity.
class SealedAgentIntruderTest : public ForgedFrameTest, private TransportListener {
 protected:
  void SetUp() override {
    ForgedFrameTest::SetUp();
    transport_ = network_.makeTransport("intruder");
    transport_->setListener(this);
    ASSERT_FALSE(transport_->connect("address 0", toZero_));
  }
  void TearDown() override {
    ForgedFrameTest::TearDown();
    transport_.reset();
  }

  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {}
  void onRendezvous(std::span<const std::byte> /*header*/, void* rendezvous, uint64_t /*bytes*/) override {
    transport_->release(rendezvous);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  void send(const wire::Header& header, std::span<const std::byte> bytes = {}, SendMode mode = SendMode::kEager) {
    headers_.push_back(header);
    bytes_.emplace_back(bytes);
    transport_->send(toZero_, headers_.back(), bytes_.back(), mode, outcomes_.emplace_back().callback());
  }
  [[nodiscard]] bool isRefused(uint64_t frames) {
    return eventually([&] {
      transport_->progress();
      return metric(0, "agent.frames_refused") == frames &&
          std::all_of(outcomes_.begin(), outcomes_.end(), [](const Outcome& each) { return each.isDone(); });
    });
  }

  // Lent to the transport, so declared before it.
  std::deque<wire::Header> headers_;
  std::deque<Bytes> bytes_;
  std::deque<Outcome> outcomes_;
  std::unique_ptr<Transport> transport_;
  EndpointId toZero_ = 0;
};

TEST_F(SealedAgentIntruderTest, NoKindOfFrameIsTakenWithoutTheKey) {
  const Bytes body = wire::BodyWriter(MessageType::PYTHON_CALL).finish();
  uint64_t sent = 0;
  for (int kind = 1; kind <= static_cast<int>(wire::Kind::kPutRefused); ++kind) {
    for (const SendMode mode : {SendMode::kEager, SendMode::kRendezvous}) {
      wire::Header header = frame(static_cast<wire::Kind>(kind));
      send(header, body, mode); // without any tag
      wire::FrameSeal("a guess").sealFrame(
          header, body.size(), mode == SendMode::kEager ? body : std::span<const std::byte>());
      send(header, body, mode);
      sent += 2;
    }
  }
  EXPECT_TRUE(isRefused(sent));
  EXPECT_EQ(handled_.load(), 0);
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok") << "worker 1 is still there for worker 0";
  EXPECT_EQ(textOf(*answer(call(0, 1, "ok"))), "ok");
}

TEST_F(SealedAgentIntruderTest, ARecordedFrameIsTakenOnceAndNotInAnotherLife) {
  const Bytes body = bodyOfRequest("recorded");
  wire::FrameSeal sealer(keyOf(1, 0));
  wire::Header header = frame(wire::Kind::kRequest);
  header.sequence = 1;
  sealer.sealFrame(header, body.size(), body);
  send(header, body);
  EXPECT_TRUE(eventually([&] { return handled_.load() == 1; })) << "genuine";
  for (int time = 0; time < 10; ++time) {
    send(header, body);
  }
  EXPECT_TRUE(isRefused(10));

  wire::Header earlier = frame(wire::Kind::kRequest);
  earlier.sequence = 2;
  earlier.targetSession ^= 1; // like a frame of an earlier run
  sealer.sealFrame(earlier, body.size(), body);
  send(earlier, body);
  EXPECT_TRUE(isRefused(11));
  earlier.targetSession ^= 1; // now with the right session
  send(earlier, body);
  EXPECT_TRUE(isRefused(12));
  earlier.sequence = 0; // a genuine frame without a number could be repeated
  earlier.targetSession = header.targetSession;
  sealer.sealFrame(earlier, body.size(), body);
  send(earlier, body);
  EXPECT_TRUE(isRefused(13));
  EXPECT_EQ(handled_.load(), 1);
}

TEST_F(SealedAgentIntruderTest, ContentThatWasChangedOnTheWayIsNotDecoded) {
  const std::string payload(kMiB, 'p');
  wire::BodyWriter writer(MessageType::PYTHON_CALL);
  writer.setPayloadSpan(payload.size(), 0);
  const Bytes body = writer.finish();
  wire::FrameSeal sealer(keyOf(1, 0));
  wire::Header header = frame(wire::Kind::kRequest);
  header.spanCount = 1;
  header.sequence = 1;
  wire::Header span = header;
  span.sequence = 2;
  span.index = 0;
  span.place = {0, payload.size()};
  wire::sealContent(keyOf(1, 0), header, {}, std::as_bytes(std::span(payload)));
  sealer.sealFrame(header, body.size(), body);
  sealer.sealFrame(span, payload.size(), {});
  std::string changed = payload;
  changed[kMiB / 2] = 'q';
  send(header, body);
  send(span, std::as_bytes(std::span(changed)), SendMode::kRendezvous);
  EXPECT_TRUE(isRefused(1));
  EXPECT_EQ(handled_.load(), 0);
  EXPECT_TRUE(eventually([&] { return metric(0, "window.in_use_bytes") == 0; }));
}

TEST_F(SealedAgentIntruderTest, AFloodOfForgedFramesLeavesNothingBehind) {
  const Bytes body(8 * kKiB);
  const auto inUse = poolBytesInUse();
  for (int number = 0; number < 2'000; ++number) {
    wire::Header header = frame(wire::Kind::kRequest);
    header.spanCount = 2; // a message that never becomes complete
    send(header, body);
    header.index = 0;
    send(header, body, SendMode::kRendezvous);
  }
  EXPECT_TRUE(isRefused(4'000));
  EXPECT_EQ(poolBytesInUse(), inUse);
  EXPECT_EQ(metric(0, "window.waiting_messages"), 0u);
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

// ------------------------------------------------------------------------------------------- groups without a size

class SealedJoinTest : public SealedAgentTest {
 protected:
  void SetUp() override {
    SealedAgentTest::SetUp();
    makeMember(0);
    agent(0).start();
  }

  void makeMember(worker_id_t rank) {
    agents_[rank] = makeAgent(rank, &echo);
    agent(rank).group().setMembership(
        {[this, rank](const std::string& /*record*/) {
           joins_.fetch_add(1);
           agent(rank).group().addMembers(asToldTo(rank, {selfOf(1)}));
         },
         [](uint64_t /*session*/) {}},
        joinKeyOf(rank));
    agent(rank).group().addMembers(asToldTo(rank, {selfOf(rank)}));
  }
  Member selfOf(worker_id_t rank) {
    return memberOf(rank, agent(rank).session(), agent(rank).address());
  }

  std::atomic<int> joins_{0};
};

TEST_F(SealedJoinTest, WorkerWithTheSecretIsAdmitted) {
  makeMember(1);
  agent(1).group().addMembers(asToldTo(1, {selfOf(0)}));
  agent(1).start();
  agent(1).group().announceJoin("record", {agent(0).session()});
  EXPECT_TRUE(eventually([&] { return agent(1).group().unadmitted().empty(); }));
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
  EXPECT_EQ(textOf(*answer(call(0, 1, "ok"))), "ok");
  EXPECT_EQ(joins_.load(), 1);

  agent(1).group().announceJoin("record", {agent(0).session()}); // like a replay of the first join
  EXPECT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 1; }));
  EXPECT_EQ(joins_.load(), 1);
}

TEST_F(SealedJoinTest, WorkerWithoutTheSecretIsNotRead) {
  Member zero = selfOf(0);
  for (const std::string& guess : {std::string(), std::string("a guess"), joinKeyOf(1)}) {
    zero.joinKey = guess;
    agents_[1] = makeAgent(1, &echo);
    agent(1).group().setMembership({[](const std::string& /*record*/) {}, [](uint64_t /*session*/) {}});
    agent(1).group().addMembers({selfOf(1), zero});
    agent(1).start();
    const uint64_t before = metric(0, "agent.frames_refused");
    agent(1).group().announceJoin("record", {agent(0).session()});
    EXPECT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == before + 1; }));
    agent(1).shutdown(); // its goodbye is refused too
    EXPECT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == before + 2; }));
    agents_.erase(1);
  }
  EXPECT_EQ(joins_.load(), 0);
}

} // namespace
} // namespace torch_ucx_rpc
