// The contract of transport/transport.h, tested on every implementation of it.

#include "transport_contract.h"
#include "eventually.h"

#include <poll.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST_P(TransportContractTest, DescribesItself) {
  TestEndpoint& a = testEndpoint("a");
  EXPECT_FALSE(a.transport->address().empty());
  EXPECT_GE(a.transport->eventFd(), 0);
  EXPECT_FALSE(a.transport->description().empty());
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
}

TEST_P(TransportContractTest, EagerMessageArrivesWithItsHeader) {
  uint64_t callId = 0;
  for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{7}, 8 * kKiB, 256 * kKiB, kMiB, 64 * kMiB}) {
    Outcome sent;
    TestEndpoint& a = testEndpoint("a");
    TestEndpoint& b = testEndpoint("b");
    const EndpointId toB = a.connect(b);
    wire::Header frame = header(++callId, wire::Kind::kResponse);
    frame.index = 1;
    frame.spanCount = 2;
    const Bytes bytes = pattern(size, callId);
    a.transport->send(toB, frame, bytes, SendMode::kEager, sent.callback());
    ASSERT_TRUE(progressUntil([&] { return sent.isDone() && !b.arrivals.empty(); })) << size;
    EXPECT_FALSE(sent.error()) << sent.error().message();
    const Arrival arrival = b.take();
    EXPECT_EQ(std::memcmp(&arrival.header, &frame, sizeof(frame)), 0);
    EXPECT_EQ(arrival.rendezvous, nullptr);
    EXPECT_TRUE(isSame(arrival.bytes, bytes)) << size;
    EXPECT_EQ(a.transport->operationsInFlight(), 0u);
    endpoints_.clear();
  }
}

TEST_P(TransportContractTest, RendezvousIsReceivedWholeAndTakesNoMemoryBefore) {
  Outcome sent[8];
  Outcome received[8];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  size_t number = 0;
  for (const uint64_t size : {uint64_t{1}, uint64_t{7}, 8 * kKiB, 40'000ul, 256 * kKiB, kMiB + 1, 64 * kMiB}) {
    wire::Header frame = header(number);
    frame.index = 0;
    frame.spanCount = 1;
    const Bytes bytes = pattern(size, number);
    Outcome& sending = sent[number];
    Outcome& receiving = received[number];
    ++number;
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sending.callback());
    ASSERT_TRUE(progressUntil([&] { return !b.arrivals.empty(); })) << size;
    const Arrival arrival = b.take();
    EXPECT_EQ(std::memcmp(&arrival.header, &frame, sizeof(frame)), 0);
    ASSERT_NE(arrival.rendezvous, nullptr) << size;
    EXPECT_EQ(arrival.rendezvousBytes, size);
    progressAWhile();
    EXPECT_FALSE(sending.isDone()) << "the sender's bytes are wanted until they are taken: " << size;
    EXPECT_EQ(a.transport->operationsInFlight(), 1u);

    Bytes into(size);
    b.transport->receive(arrival.rendezvous, into.data(), size, receiving.callback());
    ASSERT_TRUE(progressUntil([&] { return sending.isDone() && receiving.isDone(); })) << size;
    EXPECT_FALSE(sending.error()) << sending.error().message();
    EXPECT_FALSE(receiving.error()) << receiving.error().message();
    EXPECT_TRUE(isSame(into, bytes)) << size;
    EXPECT_EQ(a.transport->operationsInFlight(), 0u);
    EXPECT_EQ(b.transport->operationsInFlight(), 0u);
  }
  // The last element of `sent` is for an empty message, which may arrive as either kind.
  const wire::Header frame = header(number);
  a.transport->send(toB, frame, {}, SendMode::kRendezvous, sent[number].callback());
  ASSERT_TRUE(progressUntil([&] { return !b.arrivals.empty(); }));
  const Arrival arrival = b.take();
  EXPECT_EQ(arrival.header.callId, number);
  EXPECT_EQ(arrival.rendezvousBytes + arrival.bytes.size(), 0u);
  if (arrival.rendezvous != nullptr) {
    std::byte nothing{};
    b.transport->receive(arrival.rendezvous, &nothing, 0, received[number].callback());
  } else {
    received[number].callback()({});
  }
  ASSERT_TRUE(progressUntil([&] { return sent[number].isDone() && received[number].isDone(); }));
}

TEST_P(TransportContractTest, ReleasedRendezvousCompletesAtTheSender) {
  Outcome sent[4];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(4 * kMiB, 1);
  for (Outcome& sending : sent) {
    const wire::Header frame = header(1);
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sending.callback());
    ASSERT_TRUE(progressUntil([&] { return !b.arrivals.empty(); }));
    b.transport->release(b.take().rendezvous);
    ASSERT_TRUE(progressUntil([&] { return sending.isDone(); }));
  }
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
}

TEST_P(TransportContractTest, MessageWithoutMemoryForItIsDroppedAndTheNextArrives) {
  Outcome eager;
  Outcome rendezvous;
  Outcome next;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const wire::Header headers[] = {header(1), header(2), header(3)};
  b.isOutOfMemory = true;
  a.transport->send(toB, headers[0], std::span<const std::byte>(bytes).first(100), SendMode::kEager, eager.callback());
  a.transport->send(toB, headers[1], bytes, SendMode::kRendezvous, rendezvous.callback());
  ASSERT_TRUE(progressUntil([&] { return b.lacks == 2 && eager.isDone() && rendezvous.isDone(); }));
  b.isOutOfMemory = false;
  a.transport->send(toB, headers[2], bytes, SendMode::kEager, next.callback());
  ASSERT_TRUE(progressUntil([&] { return next.isDone() && !b.arrivals.empty(); }));
  EXPECT_FALSE(next.error()) << next.error().message();
  EXPECT_TRUE(isSame(b.take().bytes, bytes));
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
  EXPECT_TRUE(a.failed.empty());
}

TEST_P(TransportContractTest, AHandleThatWasStoredBeforeTheListenerThrewIsVoid) {
  Outcome sent[2];
  Outcome received;
  Outcome next;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const wire::Header frame = header(1);
  b.afterwards = [&b] {
    ++b.lacks;
    throw std::length_error("not only memory can lack");
  };
  for (Outcome& sending : sent) {
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sending.callback());
  }
  ASSERT_TRUE(progressUntil([&] { return b.lacks == 2 && sent[0].isDone() && sent[1].isDone(); }));
  b.afterwards = {};
  Bytes into(bytes.size());
  b.transport->receive(b.take().rendezvous, into.data(), into.size(), received.callback());
  b.transport->release(b.take().rendezvous);
  ASSERT_TRUE(progressUntil([&] { return received.isDone(); }));
  EXPECT_EQ(received.error().code(), ErrorCode::kOutOfMemory);

  a.transport->send(toB, frame, bytes, SendMode::kEager, next.callback());
  ASSERT_TRUE(progressUntil([&] { return next.isDone() && !b.arrivals.empty(); }));
  EXPECT_TRUE(isSame(b.take().bytes, bytes));
  EXPECT_EQ(a.transport->operationsInFlight() + b.transport->operationsInFlight(), 0u);
}

TEST_P(TransportContractTest, ThrowingCompletionLeavesProgressAndTheOthersStillRun) {
  constexpr size_t kSends = 3;
  Outcome sent[kSends];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const wire::Header frame = header(1);
  size_t thrown = 0;
  for (Outcome& sending : sent) {
    a.transport->send(toB, frame, bytes, SendMode::kRendezvous, [callback = sending.callback()](Error error) mutable {
      callback(std::move(error));
      throw std::runtime_error("a completion that throws");
    });
  }
  ASSERT_TRUE(progressUntil([&] { return b.arrivals.size() == kSends; }));
  while (!b.arrivals.empty()) {
    b.transport->release(b.take().rendezvous);
  }
  const auto areDone = [&] { return sent[0].isDone() && sent[1].isDone() && sent[2].isDone(); };
  EXPECT_TRUE(eventually([&] {
    try {
      progress();
    } catch (const std::runtime_error&) {
      ++thrown;
    }
    return areDone();
  }));
  EXPECT_EQ(thrown, kSends);
  EXPECT_EQ(a.transport->operationsInFlight(), 0u);
}

TEST_P(TransportContractTest, ProgressThrowsAnErrorOfOnEndpointFailedOnce) {
  if (!factory_->showsDeath()) {
    GTEST_SKIP() << "shared memory is watched by process";
  }
  Outcome first;
  Outcome late;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, {}, SendMode::kEager, first.callback());
  ASSERT_TRUE(progressUntil([&] { return first.isDone() && b.arrivals.size() == 1; }));
  a.afterwards = [] { throw std::runtime_error("a listener that throws"); };
  factory_->destroy(std::move(b.transport));
  size_t thrown = 0;
  EXPECT_TRUE(eventually([&] {
    try {
      progress();
    } catch (const std::runtime_error&) {
      ++thrown;
    }
    return thrown != 0;
  }));
  progressAWhile(); // must not throw again
  EXPECT_EQ(a.failed, std::vector<EndpointId>{toB});
  a.transport->send(toB, frame, {}, SendMode::kEager, late.callback());
  ASSERT_TRUE(progressUntil([&] { return late.isDone(); }));
  EXPECT_EQ(late.error().code(), ErrorCode::kPeerFailed);
}

TEST_P(TransportContractTest, AnEndpointOverTheNetworkUsesNoSharedMemory) {
  Outcome sent[2];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  EndpointId toB = 0;
  EndpointId toA = 0;
  Error error = a.transport->connectOverNetwork(b.transport->address(), toB);
  ASSERT_FALSE(error) << error.message();
  const wire::Header frame = header(1);
  const Bytes bytes = pattern(kMiB, 1);
  a.transport->send(toB, frame, bytes, SendMode::kEager, sent[0].callback());
  ASSERT_TRUE(progressUntil([&] { return sent[0].isDone() && b.arrivals.size() == 1; }));
  error = b.transport->connectOverNetwork(a.transport->address(), toA);
  ASSERT_FALSE(error) << error.message();
  b.transport->send(toA, frame, bytes, SendMode::kEager, sent[1].callback());
  ASSERT_TRUE(progressUntil([&] { return sent[1].isDone() && a.arrivals.size() == 1; }));
  EXPECT_TRUE(isSame(b.take().bytes, bytes));
  EXPECT_TRUE(isSame(a.take().bytes, bytes));
  if (a.transport->lanes(toB) == std::vector<std::string>{"loopback/memory"}) {
    return;
  }
  for (const std::vector<std::string>& lanes : {a.transport->lanes(toB), b.transport->lanes(toA)}) {
    EXPECT_FALSE(lanes.empty());
    for (const std::string& lane : lanes) {
      EXPECT_FALSE(lane.ends_with("/memory")) << lane;
    }
  }
}

TEST_P(TransportContractTest, EagerMessagesArriveInOrder) {
  constexpr uint64_t kMessages = 3000;
  std::vector<Outcome> sent(kMessages);
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(2000, 5);
  const std::vector<wire::Header> frames = headers(kMessages);
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    const auto part = std::span<const std::byte>(bytes).first(callId % 2000);
    a.transport->send(toB, frames[callId], part, SendMode::kEager, sent[callId].callback());
    if (callId % 100 == 0) {
      progress();
    }
  }
  ASSERT_TRUE(progressUntil([&] { return b.arrivals.size() == kMessages && a.transport->operationsInFlight() == 0; }));
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    const Arrival arrival = b.take();
    ASSERT_EQ(arrival.header.callId, callId);
    ASSERT_TRUE(isSame(arrival.bytes, std::span<const std::byte>(bytes).first(callId % 2000))) << callId;
  }
}

TEST_P(TransportContractTest, ManyRendezvousAreTakenInAnyOrder) {
  constexpr uint64_t kMessages = 64;
  constexpr uint64_t kBytes = 300'000;
  std::vector<Outcome> sent(kMessages);
  std::vector<Outcome> received(kMessages);
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  std::vector<wire::Header> frames;
  std::vector<Bytes> sources;
  std::vector<Bytes> targets;
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    frames.push_back(header(callId));
    sources.push_back(pattern(kBytes, callId));
    targets.emplace_back(kBytes);
  }
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    a.transport->send(toB, frames[callId], sources[callId], SendMode::kRendezvous, sent[callId].callback());
  }
  ASSERT_TRUE(progressUntil([&] { return b.arrivals.size() == kMessages; }));
  EXPECT_EQ(a.transport->operationsInFlight(), kMessages);
  while (!b.arrivals.empty()) { // the latest first
    const Arrival arrival = std::move(b.arrivals.back());
    b.arrivals.pop_back();
    const uint64_t callId = arrival.header.callId;
    b.transport->receive(arrival.rendezvous, targets[callId].data(), kBytes, received[callId].callback());
  }
  ASSERT_TRUE(
      progressUntil([&] { return a.transport->operationsInFlight() == 0 && b.transport->operationsInFlight() == 0; }));
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    EXPECT_FALSE(received[callId].error());
    EXPECT_TRUE(isSame(targets[callId], sources[callId])) << callId;
  }
}

TEST_P(TransportContractTest, MessagesTravelInBothDirectionsAtOnce) {
  Outcome sent[2];
  Outcome received[2];
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const EndpointId toA = b.connect(a);
  const Bytes fromA = pattern(8 * kMiB, 1);
  const Bytes fromB = pattern(8 * kMiB, 2);
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, fromA, SendMode::kRendezvous, sent[0].callback());
  b.transport->send(toA, frame, fromB, SendMode::kRendezvous, sent[1].callback());
  ASSERT_TRUE(progressUntil([&] { return !a.arrivals.empty() && !b.arrivals.empty(); }));
  Bytes atA(fromB.size());
  Bytes atB(fromA.size());
  a.transport->receive(a.take().rendezvous, atA.data(), atA.size(), received[0].callback());
  b.transport->receive(b.take().rendezvous, atB.data(), atB.size(), received[1].callback());
  ASSERT_TRUE(progressUntil(
      [&] { return sent[0].isDone() && sent[1].isDone() && received[0].isDone() && received[1].isDone(); }));
  EXPECT_TRUE(isSame(atA, fromB));
  EXPECT_TRUE(isSame(atB, fromA));
}

TEST_P(TransportContractTest, LanesAreKnownOnceThereWasTraffic) {
  Outcome sent;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const wire::Header frame = header(1);
  a.transport->send(toB, frame, {}, SendMode::kEager, sent.callback());
  ASSERT_TRUE(progressUntil([&] { return sent.isDone() && !b.arrivals.empty(); }));
  const std::vector<std::string> lanes = a.transport->lanes(toB);
  ASSERT_FALSE(lanes.empty());
  for (const std::string& lane : lanes) {
    EXPECT_NE(lane.find('/'), std::string::npos) << lane;
  }
}

// Two threads answer each other, and each sleeps in poll() while it waits. A lost wake-up shows as a poll that times
// out.
TEST_P(TransportContractTest, SleeperIsWokenEveryTime) {
  constexpr uint64_t kRounds = 10'000;
  std::vector<Outcome> sent(2 * kRounds);
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const EndpointId toA = b.connect(a);
  const std::vector<wire::Header> frames = headers(kRounds);
  std::atomic<int> lost{0};

  const auto isReadable = [&lost](TestEndpoint& self) {
    while (self.arrivals.empty()) {
      if (self.transport->progress() != 0 || !self.arrivals.empty() || !self.transport->arm()) {
        continue;
      }
      pollfd event{self.transport->eventFd(), POLLIN, 0};
      if (poll(&event, 1, 10'000) == 0) {
        self.transport->progress();
        if (!self.arrivals.empty()) {
          lost.fetch_add(1); // the message had arrived without an event
        }
        return !self.arrivals.empty();
      }
    }
    return true;
  };
  std::thread other([&] {
    for (uint64_t round = 0; round < kRounds; ++round) {
      if (!isReadable(b)) {
        return;
      }
      b.take();
      b.transport->send(toA, frames[round], {}, SendMode::kEager, sent[2 * round].callback());
    }
  });
  uint64_t rounds = 0;
  for (; rounds < kRounds; ++rounds) {
    a.transport->send(toB, frames[rounds], {}, SendMode::kEager, sent[2 * rounds + 1].callback());
    if (!isReadable(a)) {
      break;
    }
    EXPECT_EQ(a.take().header.callId, rounds);
  }
  other.join();
  EXPECT_EQ(rounds, kRounds);
  EXPECT_EQ(lost.load(), 0);
  endpoints_.clear(); // ends operations that a failure above has left open
}

TEST_P(TransportContractTest, InvalidAddressesAreRefused) {
  TestEndpoint& a = testEndpoint("a");
  for (const std::string& address : {std::string(), std::string("nobody is called this")}) {
    EndpointId endpoint = 0;
    EXPECT_TRUE(a.transport->connect(address, endpoint)) << "'" << address << "'";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Implementations, TransportContractTest, testing::ValuesIn(implementations()), [](const auto& info) {
      return info.param.name;
    });

} // namespace
} // namespace torch_ucx_rpc
