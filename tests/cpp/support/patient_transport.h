#pragma once

#include "transport/transport.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// A transport that receives when the test says so.
class PatientTransport final : public Transport {
 public:
  struct Receive {
    void* rendezvous;
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
  void receive(void* rendezvous, void* into, uint64_t bytes, OperationDone done, Memory /*memory*/) override {
    asked.push_back({rendezvous, into, bytes, std::move(done)});
    ++begun;
    if (isImmediate) {
      complete();
    }
  }
  bool canShare(const void* /*deviceMemory*/, uint64_t /*bytes*/) const override {
    return true;
  }
  void release(void* rendezvous) override {
    EXPECT_TRUE(released.insert(rendezvous).second) << "released twice";
  }
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
    return asked.size();
  }
  std::vector<std::string> lanes(EndpointId /*endpoint*/) const override {
    return {};
  }
  void abandon(EndpointId /*endpoint*/) override {}
  void close(int64_t /*limitMs*/) override {}

  // Completes the first requested receive. The bytes are its handle.
  void complete(Error error = {}) {
    Receive first = std::move(asked.front());
    asked.pop_front();
    std::memset(first.into, static_cast<int>(reinterpret_cast<uintptr_t>(first.rendezvous)), first.bytes);
    first.done(std::move(error));
  }

  bool isImmediate = false;
  size_t begun = 0;
  std::deque<Receive> asked;
  std::set<void*> released;

 private:
  const std::string address_ = "patient";
};

} // namespace torch_ucx_rpc
