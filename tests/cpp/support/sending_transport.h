#pragma once

#include "transport/transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// A transport that finishes sends when the test says so, and notes all requests.
class SendingTransport final : public Transport {
 public:
  struct Send {
    EndpointId endpoint;
    wire::Header header;
    size_t bytes;
    SendMode mode;
    OperationDone done;
  };

  SendingTransport() = default;
  ~SendingTransport() override {
    ::close(eventFd_);
  }

  void setListener(TransportListener* /*listener*/) override {}
  const std::string& address() const override {
    return address_;
  }
  int eventFd() const override {
    return eventFd_;
  }
  std::vector<std::pair<std::string, std::string>> description() const override {
    return {};
  }
  Error connect(const std::string& address, EndpointId& endpoint) override {
    if (connectError) {
      return connectError;
    }
    endpoint = static_cast<EndpointId>(connected.size());
    connected.push_back(address);
    return {};
  }
  Error connectOverNetwork(const std::string& address, EndpointId& endpoint) override {
    if (networkError) {
      return networkError;
    }
    return connect(address + " over the network", endpoint);
  }
  void send(
      EndpointId endpoint,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory /*memory*/) override {
    if (const auto error = sendErrors.find(begun++); error != sendErrors.end()) {
      done(error->second);
      return;
    }
    sent.push_back({endpoint, header, bytes.size(), mode, std::move(done)});
  }
  void receive(
      void* /*rendezvous*/, void* /*into*/, uint64_t /*bytes*/, OperationDone done, Memory /*memory*/) override {
    done({ErrorCode::kInternal, "nothing arrives here"});
  }
  bool canShare(const void* /*deviceMemory*/, uint64_t /*bytes*/) const override {
    return true;
  }
  void release(void* /*rendezvous*/) override {}
  const void* originOf(void* /*rendezvous*/) const override {
    return nullptr;
  }
  bool closeOrigin(const void* /*origin*/) override {
    return false;
  }
  unsigned progress() override {
    return 0;
  }
  bool arm() override {
    return true;
  }
  size_t operationsInFlight() const override {
    return sent.size();
  }
  std::vector<std::string> lanes(EndpointId /*endpoint*/) const override {
    return {};
  }
  RepairState repairState() override {
    ++repairs;
    return repairs >= repairsNeeded ? RepairState::kWhole : notWhole;
  }
  void scanForRepair() override {
    ++scans;
  }
  void abandon(EndpointId endpoint) override {
    abandoned.push_back(endpoint);
  }
  void close(int64_t /*limitMs*/) override {
    while (!sent.empty()) {
      finish({ErrorCode::kCanceled, "closed"});
    }
  }

  // Finishes the oldest open send, or the one at `index` after it.
  void finish(Error error = {}, size_t index = 0) {
    OperationDone done = std::move(sent[index].done);
    sent.erase(sent.begin() + static_cast<std::ptrdiff_t>(index));
    done(std::move(error));
  }
  std::vector<uint64_t> callsUnderWay() const {
    std::vector<uint64_t> calls;
    for (const Send& send : sent) {
      calls.push_back(send.header.callId);
    }
    return calls;
  }

  Error connectError;
  std::map<size_t, Error> sendErrors; // for sends that fail at once, by number
  Error networkError; // for connectOverNetwork() only
  std::vector<std::string> connected; // addresses, by endpoint
  std::deque<Send> sent; // sends that are not finished
  size_t begun = 0;
  std::vector<EndpointId> abandoned;
  int repairs = 0;
  int scans = 0;
  int repairsNeeded = 1; // repairs until no slot blocks the queue
  RepairState notWhole = RepairState::kUndecided; // the result until then

 private:
  const std::string address_ = "sending";
  const int eventFd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
};

} // namespace torch_ucx_rpc
