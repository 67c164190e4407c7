// If a process can open no more files, failed sends name the cause.

#include "eventually.h"
#include "outcome.h"
#include "ucp_lanes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <thread>

namespace torch_ucx_rpc {
namespace {

class Deaf final : public TransportListener {
 public:
  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {}
  void onRendezvous(std::span<const std::byte> /*header*/, void* /*rendezvous*/, uint64_t /*bytes*/) override {}
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& error) override {
    failure = error;
  }

  Error failure;
};

// Another process with a transport and its own limit of open files.
class Neighbour {
 public:
  Neighbour() {
    std::array<int, 2> pipes{};
    if (pipe(pipes.data()) != 0) {
      std::abort();
    }
    pid_ = fork();
    if (pid_ == 0) {
      Deaf listener;
      const std::unique_ptr<Transport> transport = makeUcpTransportOver("tcp");
      transport->setListener(&listener);
      (void)!write(pipes[1], transport->address().data(), transport->address().size());
      ::close(pipes[1]);
      while (true) {
        transport->progress();
        std::this_thread::yield();
      }
    }
    ::close(pipes[1]);
    std::array<char, 4096> text{};
    for (ssize_t bytes = 0; (bytes = read(pipes[0], text.data(), text.size())) > 0;) {
      address.append(text.data(), static_cast<size_t>(bytes));
    }
    ::close(pipes[0]);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;
  ~Neighbour() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  std::string address;

 private:
  pid_t pid_ = -1;
};

// UCX opens some of its sockets when the peer answers. If that counted as the peer's failure, a healthy peer would be
// lost.
TEST(FullFileTable, ConnectionThatFindsNoFilesIsNotBlamedOnThePeer) {
  const Neighbour neighbour; // fork it before UCX starts here
  Deaf listener;
  Outcome small;
  Outcome large;
  const std::unique_ptr<Transport> transport = makeUcpTransportOver("tcp");
  transport->setListener(&listener);
  EndpointId endpoint = 0;
  ASSERT_FALSE(transport->connect(neighbour.address, endpoint));
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  wire::Header header{};
  const std::string bytes(1 << 20, 'x');
  const auto sent = std::as_bytes(std::span(bytes));
  transport->send(endpoint, header, sent.first(1), SendMode::kEager, small.callback(), Memory::kHost);
  transport->send(endpoint, header, sent, SendMode::kRendezvous, large.callback(), Memory::kHost);
  EXPECT_TRUE(eventually([&] {
    transport->progress();
    return small.isDone() && large.isDone();
  }));
  EXPECT_TRUE(eventually([&] {
    transport->progress();
    return bool(listener.failure);
  }));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_TRUE(!small.error() || isLocal(small.error().code())) << small.error().message();
  EXPECT_TRUE(isLocal(large.error().code())) << large.error().message();
  EXPECT_EQ(listener.failure.code(), ErrorCode::kOutOfFiles) << listener.failure.message();
  transport->close(0);
}

} // namespace
} // namespace torch_ucx_rpc
