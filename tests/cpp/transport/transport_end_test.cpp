// The part of the contract of transport/transport.h about the ends of endpoints and transports.

#include "eventually.h"
#include "transport_contract.h"

#include <poll.h>

#include <atomic>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST_P(TransportContractTest, AbandoningAnEndpointEndsItsOwnOperationsOnly) {
  Outcome pending[2];
  Outcome other;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  TestEndpoint& c = testEndpoint("c");
  const EndpointId toB = a.connect(b);
  const EndpointId toC = a.connect(c);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const Bytes others = pattern(100 * kKiB, 2); // UCX ends no send whose memory it also sends to another peer
  const wire::Header frame = header(1);
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
  for (Outcome& sending : pending) {
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sending.callback());
  }
  a.transport->send(toC, frame, others, SendMode::kRendezvous, other.callback());
  EXPECT_EQ(a.transport->operationsInFlight(), 3u);
  ASSERT_TRUE(progressUntil([&] { return b.arrivals.size() == 2; }));
  b.transport->release(b.take().rendezvous);
  ASSERT_TRUE(progressUntil([&] { return a.transport->operationsInFlight() == 2; }));
  a.transport->abandon(toB);
  EXPECT_TRUE(progressUntil([&] { return pending[0].isDone() && pending[1].isDone(); }));
  EXPECT_EQ(a.transport->operationsInFlight(), 1u);
  EXPECT_FALSE(other.isDone());
  endpoints_.clear(); // ends the open operations
}

TEST_P(TransportContractTest, DeathOfAPeerEndsItsSends) {
  if (!factory_->showsDeath()) {
    GTEST_SKIP() << "shared memory is watched by process";
  }
  Outcome first;
  Outcome late;
  Untaken sent(*this);
  TestEndpoint& a = sent.a;
  TestEndpoint& c = testEndpoint("c");
  const EndpointId toC = a.connect(c);
  a.transport->send(sent.toB, sent.frame, {}, SendMode::kEager, first.callback());
  ASSERT_TRUE(progressUntil([&] { return first.isDone() && sent.b.arrivals.size() == 4; }));
  EXPECT_FALSE(first.error());

  // The transport ends without releasing its rendezvous, like a killed process.
  factory_->destroy(std::move(sent.b.transport));
  ASSERT_TRUE(progressUntil([&] { return !a.failed.empty() && a.transport->operationsInFlight() == 0; }));
  EXPECT_EQ(a.failed, std::vector<EndpointId>{sent.toB});
  for (const Outcome& sending : sent.pending) {
    EXPECT_TRUE(sending.isDone());
  }
  a.transport->send(sent.toB, sent.frame, {}, SendMode::kEager, late.callback());
  ASSERT_TRUE(progressUntil([&] { return late.isDone(); }));
  EXPECT_TRUE(late.error());
  progressAWhile();
  EXPECT_EQ(a.failed.size(), 1u) << "told once";
  expectToReach(a, toC, c);
}

TEST_P(TransportContractTest, ReceiveEndsWithItsOriginAndEachEndpointHasItsOwn) {
  if (std::string_view(GetParam().name) != "UcpOverTcp") {
    GTEST_SKIP() << "a receive ends at once";
  }
  Outcome again;
  Outcome earlier;
  Outcome receiving;
  Outcome receivingAgain;
  Untaken sent(*this); // `b` has made no endpoint, so UCX has
  TestEndpoint& a = sent.a;
  TestEndpoint& b = sent.b;
  a.transport->send(a.connect(b), sent.frame, sent.bytes, SendMode::kRendezvous, again.callback());
  ASSERT_TRUE(progressUntil([&] { return b.arrivals.size() == 4; }));
  const Arrival first = b.take();
  const Arrival second = b.take();
  const Arrival last = std::move(b.arrivals.back());
  const void* const origin = b.transport->originOf(first.rendezvous);
  EXPECT_EQ(b.transport->originOf(second.rendezvous), origin);
  EXPECT_NE(b.transport->originOf(last.rendezvous), origin);

  Bytes into(kMiB);
  b.transport->receive(second.rendezvous, into.data(), kMiB, earlier.callback()); // connects the way back
  ASSERT_TRUE(progressUntil([&] { return earlier.isDone(); }));
  a.transport->abandon(sent.toB);
  progressAWhile();
  b.transport->receive(first.rendezvous, into.data(), kMiB, receiving.callback()); // UCX does not end it
  progressAWhile();
  for (int tries = 0; !receiving.isDone() && tries < 10; ++tries) {
    ASSERT_TRUE(b.transport->closeOrigin(origin));
    progressAWhile();
  }
  ASSERT_TRUE(receiving.isDone());
  EXPECT_TRUE(receiving.error());
  b.transport->receive(last.rendezvous, into.data(), kMiB, receivingAgain.callback());
  ASSERT_TRUE(progressUntil([&] { return again.isDone() && receivingAgain.isDone(); }));
  EXPECT_FALSE(receivingAgain.error()) << receivingAgain.error().message();
  EXPECT_TRUE(isSame(into, sent.bytes));
  endpoints_.clear(); // ends the open operations
}

TEST_P(TransportContractTest, AbandonedEndpointEndsItsOperationsWithAnError) {
  Outcome late;
  Untaken sent(*this);
  TestEndpoint& a = sent.a;
  TestEndpoint& c = testEndpoint("c");
  const EndpointId toC = a.connect(c);
  a.transport->abandon(sent.toB);
  a.transport->abandon(sent.toB); // twice does no harm
  ASSERT_TRUE(progressUntil([&] { return a.transport->operationsInFlight() == 0; }));
  for (const Outcome& sending : sent.pending) {
    EXPECT_TRUE(sending.error());
  }
  a.transport->send(sent.toB, sent.frame, {}, SendMode::kEager, late.callback());
  ASSERT_TRUE(progressUntil([&] { return late.isDone(); }));
  EXPECT_TRUE(late.error());
  expectToReach(a, toC, c);
}

TEST_P(TransportContractTest, AbandonBeforeThePeerHasHeardAnythingEndsTheOperations) {
  Outcome pending[2];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(kMiB, 1);
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, bytes, SendMode::kRendezvous, pending[0].callback());
  a.transport->send(toB, frame, {}, SendMode::kEager, pending[1].callback());
  a.transport->abandon(toB);
  ASSERT_TRUE(progressUntil([&] { return a.transport->operationsInFlight() == 0; }));
  EXPECT_TRUE(pending[0].error());
}

TEST_P(TransportContractTest, CloseWithOperationsInFlightEndsThemAll) {
  Outcome unheard;
  Untaken sent(*this);
  TestEndpoint& a = sent.a;
  const EndpointId toC = a.connect(testEndpoint("c"));
  a.transport->send(toC, sent.frame, sent.bytes, SendMode::kRendezvous, unheard.callback()); // c never makes progress
  testing::internal::CaptureStdout(); // UCX complains here about open requests of its worker
  a.transport->close(20);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  for (const Outcome& sending : sent.pending) {
    EXPECT_TRUE(sending.isDone());
    EXPECT_TRUE(sending.error());
  }
  EXPECT_TRUE(unheard.isDone());
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
  a.transport.reset();
}

TEST_P(TransportContractTest, CloseReleasesUntakenMessages) {
  Untaken sent(*this);
  sent.b.transport->close(1000);
  sent.b.transport.reset();
  ASSERT_TRUE(progressUntil([&] { return sent.a.transport->operationsInFlight() == 0; }))
      << "the sender's bytes are pinned for ever";
}

// Over TCP this send never finishes: the peer reads nothing, and the kernel's buffers are full.
TEST_P(TransportContractTest, CloseWithAPeerThatReadsNothingEndsEverything) {
  constexpr size_t kSends = 8;
  Outcome first;
  Outcome pending[2 * kSends];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(8 * kMiB, 1);
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, {}, SendMode::kEager, first.callback());
  ASSERT_TRUE(progressUntil([&] { return first.isDone() && b.arrivals.size() == 1; }));
  for (size_t number = 0; number < kSends; ++number) {
    a.transport->send(toB, frame, bytes, SendMode::kEager, pending[2 * number].callback());
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, pending[2 * number + 1].callback());
    a.transport->progress();
  }
  testing::internal::CaptureStdout();
  a.transport->close(20);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
  a.transport.reset();
}

TEST_P(TransportContractTest, CloseDuringAReceiveEndsIt) {
  Outcome sent;
  Outcome received;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  (void)b.connect(a); // like a worker that will answer
  const Bytes bytes = pattern(64 * kMiB, 1);
  Bytes into(bytes.size());
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sent.callback());
  ASSERT_TRUE(progressUntil([&] { return !b.arrivals.empty(); }));
  b.transport->receive(b.take().rendezvous, into.data(), into.size(), received.callback());
  b.transport->progress();
  testing::internal::CaptureStdout();
  b.transport->close(0);
  EXPECT_TRUE(received.isDone());
  b.transport.reset();
  a.transport->close(0);
  EXPECT_TRUE(sent.isDone());
  a.transport.reset();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_P(TransportContractTest, CloseFlushesEagerMessages) {
  constexpr uint64_t kMessages = 200;
  std::vector<Outcome> sent(kMessages);
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  std::atomic<bool> isOver{false};
  std::thread receiver([&] { // b's transport now belongs to this thread
    while (!isOver.load()) {
      if (b.transport->progress() == 0 && b.transport->arm()) {
        pollfd event{b.transport->eventFd(), POLLIN, 0};
        (void)poll(&event, 1, 1);
      }
    }
    (void)eventually([&] {
      b.transport->progress();
      return b.arrivals.size() == kMessages;
    });
  });
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(4000, 1);
  const std::vector<wire::Header> frames = headers(kMessages);
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    a.transport->send(toB, frames[callId], bytes, SendMode::kEager, sent[callId].callback());
  }
  a.transport->close(10'000);
  a.transport.reset();
  isOver.store(true);
  receiver.join();
  EXPECT_EQ(b.arrivals.size(), kMessages);
}

TEST_P(TransportContractTest, SecondCloseDoesNothing) {
  TestEndpoint& a = testEndpoint("a");
  a.transport->close(0);
  a.transport->close(0);
  a.transport.reset();
}

INSTANTIATE_TEST_SUITE_P(
    Implementations, TransportContractTest, testing::ValuesIn(implementations()), [](const auto& info) {
      return info.param.name;
    });

} // namespace
} // namespace torch_ucx_rpc
