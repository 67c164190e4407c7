// The contract of transport/transport.h, written once and run on every implementation of it.

#include "base/bytes.h"
#include "eventually.h"
#include "loopback_transport.h"
#include "outcome.h"
#include "transport/transport.h"
#include "ucp_lanes.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

// The network between the transports of a test.
class TransportFactory {
 public:
  virtual ~TransportFactory() = default;
  virtual std::unique_ptr<Transport> make(const std::string& name) = 0;
  // Ends a transport as the death of its process would.
  virtual void destroy(std::unique_ptr<Transport> transport) = 0;
  // Whether others notice the death of a transport in this process.
  virtual bool showsDeath() const = 0;
};

class LoopbackFactory final : public TransportFactory {
 public:
  std::unique_ptr<Transport> make(const std::string& name) override {
    return network_.makeTransport(name);
  }
  void destroy(std::unique_ptr<Transport> transport) override {
    network_.kill(transport->address());
  }
  bool showsDeath() const override {
    return true;
  }

 private:
  LoopbackNetwork network_;
};

class UcpFactory final : public TransportFactory {
 public:
  explicit UcpFactory(std::string lanes) : lanes_(std::move(lanes)) {}

  std::unique_ptr<Transport> make(const std::string& /*name*/) override {
    return makeUcpTransportOver(lanes_);
  }
  void destroy(std::unique_ptr<Transport> transport) override {
    transport.reset();
  }
  bool showsDeath() const override {
    return !lanes_.empty(); // shared memory is watched by process, and this process lives on
  }

 private:
  const std::string lanes_;
};

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<TransportFactory>()> makeFactory;
};

void PrintTo(const Implementation& implementation, std::ostream* out) {
  *out << implementation.name;
}

struct Arrival {
  wire::Header header;
  Bytes bytes; // of an eager message
  void* rendezvous = nullptr;
  uint64_t rendezvousBytes = 0;
};

// A transport, and its events.
class TestEndpoint final : public TransportListener {
 public:
  explicit TestEndpoint(std::unique_ptr<Transport> made) : transport(std::move(made)) {
    transport->setListener(this);
  }

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override {
    takeMemory();
    arrivals.push_back({readHeader(header), Bytes(bytes)});
    throwWhatIsAsked();
  }
  void onRendezvous(std::span<const std::byte> header, void* rendezvous, uint64_t bytes) override {
    takeMemory();
    arrivals.push_back({readHeader(header), {}, rendezvous, bytes});
    throwWhatIsAsked();
  }
  void onEndpointFailed(EndpointId endpoint, const Error& error) override {
    EXPECT_TRUE(error);
    failed.push_back(endpoint);
    throwWhatIsAsked();
  }

  EndpointId connect(const TestEndpoint& peer) const {
    EndpointId endpoint = 0;
    const Error error = transport->connect(peer.transport->address(), endpoint);
    EXPECT_FALSE(error) << error.message();
    return endpoint;
  }

  Arrival take() {
    Arrival arrival = std::move(arrivals.front());
    arrivals.pop_front();
    return arrival;
  }

  std::unique_ptr<Transport> transport;
  std::deque<Arrival> arrivals;
  std::vector<EndpointId> failed;
  bool isOutOfMemory = false;
  size_t lacks = 0; // messages for which there was no memory
  std::function<void()> afterwards; // runs at the end of each callback, and may throw

 private:
  void throwWhatIsAsked() const {
    if (afterwards) {
      afterwards();
    }
  }
  void takeMemory() {
    if (isOutOfMemory) {
      ++lacks;
      throw std::bad_alloc();
    }
  }

  static wire::Header readHeader(std::span<const std::byte> bytes) {
    wire::Header header;
    const Error error = wire::readHeader(bytes, header);
    EXPECT_FALSE(error) << error.message();
    return header;
  }
};

wire::Header header(uint64_t callId, wire::Kind kind = wire::Kind::kRequest) {
  wire::Header made;
  made.kind = kind;
  made.sourceRank = 3;
  made.sourceSession = 0x1122334455667788;
  made.targetSession = 0x99AABBCCDDEEFF00;
  made.callId = callId;
  return made;
}

Bytes pattern(uint64_t size, uint64_t seed) {
  Bytes bytes(size);
  uint64_t state = seed * 2 + 1;
  for (uint64_t at = 0; at + sizeof(state) <= size; at += sizeof(state)) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::memcpy(bytes.data() + at, &state, sizeof(state));
  }
  for (uint64_t at = size - size % sizeof(state); at < size; ++at) {
    bytes.data()[at] = static_cast<std::byte>(seed + at);
  }
  return bytes;
}

bool isSame(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

class TransportContractTest : public testing::TestWithParam<Implementation> {
 protected:
  TransportContractTest() : factory_(GetParam().makeFactory()) {}

  TestEndpoint& testEndpoint(const std::string& name) {
    endpoints_.push_back(std::make_unique<TestEndpoint>(factory_->make(name)));
    return *endpoints_.back();
  }

  void progress() {
    for (const auto& each : endpoints_) {
      if (each->transport != nullptr) {
        each->transport->progress();
      }
    }
  }

  // Progresses all transports until the condition holds.
  [[nodiscard]] bool progressUntil(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      progress();
    }
    return true;
  }

  // Progresses all transports until all have been idle for a while, to show that something does not happen.
  void progressAWhile() {
    for (int round = 0; round < 2000; ++round) {
      progress();
    }
  }

  // Sends an empty message, which must arrive.
  void expectToReach(const TestEndpoint& from, EndpointId endpoint, const TestEndpoint& to) {
    Outcome outcome;
    const wire::Header frame = header(1);
    from.transport->send(endpoint, frame, {}, SendMode::kEager, outcome.callback());
    ASSERT_TRUE(progressUntil([&] { return outcome.isDone() && !to.arrivals.empty(); }));
    EXPECT_FALSE(outcome.error());
  }

  // Two endpoints, and three messages of `a` by rendezvous, which have arrived at `b` and are not taken.
  struct Untaken {
    explicit Untaken(TransportContractTest& test)
        : a(test.testEndpoint("a")), b(test.testEndpoint("b")), toB(a.connect(b)) {
      for (Outcome& sending : pending) {
        a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sending.callback());
      }
      EXPECT_TRUE(test.progressUntil([&] { return b.arrivals.size() == std::size(pending); }));
    }

    Outcome pending[3];
    TestEndpoint& a;
    TestEndpoint& b;
    const EndpointId toB;
    const wire::Header frame = header(1);
    const Bytes bytes = pattern(kMiB, 1);
  };

  std::unique_ptr<TransportFactory> factory_;
  std::vector<std::unique_ptr<TestEndpoint>> endpoints_;
};

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
  // `sent` has one more element than sizes: an empty message, which may arrive either way.
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

TEST_P(TransportContractTest, AListenerMayThrowAfterItHasReleased) {
  Outcome sent;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const wire::Header frame = header(1);
  b.afterwards = [&b] {
    b.transport->release(b.take().rendezvous);
    throw std::bad_alloc();
  };
  a.transport->send(toB, frame, bytes, SendMode::kRendezvous, sent.callback());
  ASSERT_TRUE(progressUntil([&] { return sent.isDone(); }));
  EXPECT_TRUE(b.arrivals.empty());
  b.afterwards = {};
  b.transport->close(0);
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
  progressAWhile(); // throws nothing more
  EXPECT_EQ(a.failed, std::vector<EndpointId>{toB});
  a.transport->send(toB, frame, {}, SendMode::kEager, late.callback());
  ASSERT_TRUE(progressUntil([&] { return late.isDone(); }));
  EXPECT_EQ(late.error().code(), ErrorCode::kPeerFailed);
}

TEST_P(TransportContractTest, AbandoningAnEndpointEndsItsOwnOperationsOnly) {
  Outcome pending[2];
  Outcome other;
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  TestEndpoint& c = testEndpoint("c");
  const EndpointId toB = a.connect(b);
  const EndpointId toC = a.connect(c);
  const Bytes bytes = pattern(100 * kKiB, 1);
  const Bytes others = pattern(100 * kKiB, 2); // UCX ends no send while it sends the same memory to somebody else
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
  std::vector<wire::Header> frames;
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    frames.push_back(header(callId));
  }
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

TEST_P(TransportContractTest, BothDirectionsAtOnce) {
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

TEST_P(TransportContractTest, LanesAreNamedAfterTraffic) {
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

  // Without releasing its rendezvous, like a killed process.
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
  testing::internal::CaptureStdout(); // where UCX complains about requests that its worker still has
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
  (void)b.connect(a); // as a worker that will answer
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
  std::thread receiver([&] { // b's transport belongs to this thread now
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
  std::vector<wire::Header> frames;
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    frames.push_back(header(callId));
  }
  for (uint64_t callId = 0; callId < kMessages; ++callId) {
    a.transport->send(toB, frames[callId], bytes, SendMode::kEager, sent[callId].callback());
  }
  a.transport->close(10'000);
  a.transport.reset();
  isOver.store(true);
  receiver.join();
  EXPECT_EQ(b.arrivals.size(), kMessages);
}

TEST_P(TransportContractTest, CloseTwiceIsCloseOnce) {
  TestEndpoint& a = testEndpoint("a");
  a.transport->close(0);
  a.transport->close(0);
  a.transport.reset();
}

// Two threads that answer each other, each asleep in poll() while it waits. A lost wake-up would be a poll that times
// out.
TEST_P(TransportContractTest, SleeperIsWokenEveryTime) {
  constexpr uint64_t kRounds = 10'000;
  std::vector<Outcome> sent(2 * kRounds);
  TestEndpoint& a = testEndpoint("a");
  TestEndpoint& b = testEndpoint("b");
  const EndpointId toB = a.connect(b);
  const EndpointId toA = b.connect(a);
  std::vector<wire::Header> frames;
  for (uint64_t round = 0; round < kRounds; ++round) {
    frames.push_back(header(round));
  }
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
  endpoints_.clear(); // ends what a failure above has left open
}

TEST_P(TransportContractTest, AddressesThatMakeNoSenseAreRefused) {
  TestEndpoint& a = testEndpoint("a");
  for (const std::string& address : {std::string(), std::string("nobody is called this")}) {
    EndpointId endpoint = 0;
    EXPECT_TRUE(a.transport->connect(address, endpoint)) << "'" << address << "'";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Implementations,
    TransportContractTest,
    testing::Values(
        Implementation{"Loopback", [] { return std::make_unique<LoopbackFactory>(); }},
        Implementation{"Ucp", [] { return std::make_unique<UcpFactory>(""); }},
        Implementation{"UcpOverTcp", [] { return std::make_unique<UcpFactory>("tcp"); }}),
    [](const auto& info) { return info.param.name; });

} // namespace
} // namespace torch_ucx_rpc
