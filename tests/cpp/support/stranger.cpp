// A process outside of the job that sends given frames over UCX: stranger <file>, see stranger.h. It exits with 0 when
// the worker has taken or refused all frames.

#include "stranger.h"

#include "transport/ucp/ucp_transport.h"

#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>
#include <string>

using namespace torch_ucx_rpc;

namespace {

class Deaf final : public TransportListener {
  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {}
  void onRendezvous(std::span<const std::byte> /*header*/, void* /*rendezvous*/, uint64_t /*bytes*/) override {}
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& error) override {
    std::fprintf(stderr, "stranger: %s\n", error.message().c_str());
  }
};

// With more, UCX itself would take memory on both sides.
constexpr size_t kInFlight = 64;
constexpr auto kPatience = std::chrono::seconds(60);

template <typename T>
bool read(std::ifstream& file, T& value) {
  return static_cast<bool>(file.read(reinterpret_cast<char*>(&value), sizeof(T)));
}

} // namespace

int main(int argumentCount, char** arguments) {
  std::ifstream file(argumentCount == 2 ? arguments[1] : "", std::ios::binary);
  uint64_t addressBytes = 0;
  if (!read(file, addressBytes)) {
    std::fprintf(stderr, "usage: stranger <file with an address and shots>\n");
    return 2;
  }
  std::string address(addressBytes, '\0');
  file.read(address.data(), static_cast<std::streamsize>(addressBytes));

  Deaf listener;
  const std::unique_ptr<Transport> transport = makeUcpTransport(1);
  transport->setListener(&listener);
  EndpointId endpoint = 0;
  if (const Error error = transport->connect(address, endpoint)) {
    std::fprintf(stderr, "stranger: %s\n", error.message().c_str());
    return 1;
  }

  bool hasFailed = false;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto progressTo = [&](size_t inFlight) {
    while (transport->operationsInFlight() > inFlight && std::chrono::steady_clock::now() < deadline) {
      transport->progress();
    }
  };
  for (Shot shot; read(file, shot);) {
    Bytes data(shot.dataBytes);
    file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
    for (uint32_t time = 0; time < shot.times; ++time) {
      transport->send(endpoint, shot.header, data, shot.mode, [&](const Error& error) { hasFailed |= bool(error); });
      progressTo(kInFlight);
    }
    progressTo(0); // UCX reads the header and the data until then
  }
  const bool isDone = transport->operationsInFlight() == 0;
  transport->close(1000);
  return isDone && !hasFailed ? 0 : 1;
}
