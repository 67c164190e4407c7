// The implementations of transport/transport.h, and the fixture of the tests that run on all of them.

#pragma once

#include "base/bytes.h"
#include "eventually.h"
#include "loopback_transport.h"
#include "outcome.h"
#include "transport/transport.h"
#include "ucp_lanes.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

// Makes and ends the transports of a test, which share a network.
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
    return !lanes_.empty(); // shared memory shows only the end of a process, and this process lives on
  }

 private:
  const std::string lanes_;
};

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<TransportFactory>()> makeFactory;
};

inline std::vector<Implementation> implementations() {
  return {
      {"Loopback", [] { return std::make_unique<LoopbackFactory>(); }},
      {"Ucp", [] { return std::make_unique<UcpFactory>(""); }},
      {"UcpOverTcp", [] { return std::make_unique<UcpFactory>("tcp"); }}};
}

inline void PrintTo(const Implementation& implementation, std::ostream* out) {
  *out << implementation.name;
}

struct Arrival {
  wire::Header header;
  Bytes bytes; // the bytes of an eager message
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
  size_t lacks = 0; // the number of messages without memory for them
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

inline wire::Header header(uint64_t callId, wire::Kind kind = wire::Kind::kRequest) {
  wire::Header made;
  made.kind = kind;
  made.sourceRank = 3;
  made.sourceSession = 0x1122334455667788;
  made.targetSession = 0x99AABBCCDDEEFF00;
  made.callId = callId;
  return made;
}

// Headers with the numbers from 0 on. Each must stay until its send is done.
inline std::vector<wire::Header> headers(uint64_t count) {
  std::vector<wire::Header> made;
  for (uint64_t callId = 0; callId < count; ++callId) {
    made.push_back(header(callId));
  }
  return made;
}

inline Bytes pattern(uint64_t size, uint64_t seed) {
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

inline bool isSame(std::span<const std::byte> a, std::span<const std::byte> b) {
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

  // Progresses all transports many times, to show that something does not happen.
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

} // namespace torch_ucx_rpc
