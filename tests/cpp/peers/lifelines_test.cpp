// A lifeline shows the end of a peer's process. The ports are real ports of this machine.

#include "peers/lifelines.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {
namespace {

// A port on which only reset() calls accept(). The kernel makes connections nevertheless.
class Listener {
 public:
  explicit Listener(uint16_t port = 0) {
    const int reuse = 1;
    EXPECT_EQ(setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)), 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_, 16), 0);
  }
  ~Listener() {
    close();
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  uint16_t port() const {
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    return ntohs(address.sin_port);
  }
  // Ends the connection that has waited longest, as a firewall might. The port stays open.
  void reset() const {
    const int connection = accept(socket_, nullptr, nullptr);
    EXPECT_GE(connection, 0);
    const linger atOnce{1, 0};
    EXPECT_EQ(setsockopt(connection, SOL_SOCKET, SO_LINGER, &atOnce, sizeof(atOnce)), 0);
    ::close(connection);
  }
  void close() {
    if (socket_ >= 0) {
      ::close(std::exchange(socket_, -1));
    }
  }

 private:
  int socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

class LifelinesTest : public testing::Test {
 protected:
  static Member memberAt(uint16_t port) {
    Member member;
    member.session = 7;
    member.lifelineHost = "127.0.0.1";
    member.lifelinePort = port;
    return member;
  }
  void connect(uint16_t port) {
    lines_.connect(memberAt(port), [this] { ++cuts_; });
  }
  // Runs the oldest watch if its descriptor becomes readable. Returns whether it ran.
  bool runWatch(int timeoutMs = 30'000) {
    if (watched_.empty()) {
      return false;
    }
    pollfd event{watched_.front().first, POLLIN, 0};
    if (poll(&event, 1, timeoutMs) != 1) {
      return false;
    }
    UniqueFunction<void()> onReadable = std::move(watched_.front().second);
    watched_.pop_front();
    onReadable();
    return true;
  }

  std::deque<std::pair<int, UniqueFunction<void()>>> watched_;
  int cuts_ = 0;
  Lifelines lines_{
      [this](int fd, UniqueFunction<void()> onReadable) { watched_.emplace_back(fd, std::move(onReadable)); }};
};

TEST_F(LifelinesTest, EndOfTheListenerIsACut) {
  Listener listener;
  connect(listener.port());
  EXPECT_FALSE(runWatch(50)) << "nothing has happened";
  listener.close();
  EXPECT_TRUE(runWatch()) << "the connection ends";
  EXPECT_TRUE(runWatch()) << "and the port refuses another";
  EXPECT_EQ(cuts_, 1);
  EXPECT_TRUE(watched_.empty());
}

TEST_F(LifelinesTest, ConnectionThatEndsWhileThePortStaysOpenIsNoCut) {
  Listener listener;
  connect(listener.port());
  listener.reset();
  EXPECT_TRUE(runWatch());
  EXPECT_FALSE(runWatch(50)) << "it is connected again";
  listener.close();
  EXPECT_TRUE(runWatch() && runWatch());
  EXPECT_EQ(cuts_, 1) << "the new connection shows the end";
}

TEST_F(LifelinesTest, ConnectionThatEndsAgainAndAgainSaysNothing) {
  Listener listener;
  connect(listener.port());
  int resets = 0;
  for (; !watched_.empty(); ++resets) {
    listener.reset();
    ASSERT_TRUE(runWatch());
    ASSERT_LT(resets, 100);
  }
  EXPECT_GT(resets, 1);
  EXPECT_EQ(cuts_, 0);
}

TEST_F(LifelinesTest, PortThatRefusesFromTheBeginningSaysNothing) {
  Listener listener;
  const uint16_t port = listener.port();
  listener.close();
  connect(port);
  runWatch(); // there is a watch only if the kernel has not refused at once
  EXPECT_EQ(cuts_, 0);
  EXPECT_TRUE(watched_.empty());
}

TEST_F(LifelinesTest, PeerWithoutALifelineIsNotConnectedTo) {
  connect(0);
  EXPECT_TRUE(watched_.empty());
}

TEST_F(LifelinesTest, InvalidAddressSaysNothing) {
  Member member = memberAt(9);
  member.lifelineHost = "no address";
  lines_.connect(member, [this] { ++cuts_; });
  EXPECT_TRUE(watched_.empty());
}

TEST_F(LifelinesTest, PeerIsConnectedToOnce) {
  const Listener listener;
  connect(listener.port());
  connect(listener.port());
  EXPECT_EQ(watched_.size(), 1u);
}

TEST_F(LifelinesTest, PeerThatIsForgottenIsNotCut) {
  Listener listener;
  connect(listener.port());
  listener.close();
  ASSERT_TRUE(runWatch());
  lines_.forget(memberAt(1));
  lines_.forget(memberAt(1)); // twice does no harm
  watched_.front().second(); // the watch was about to run
  EXPECT_EQ(cuts_, 0);
}

TEST(UnwatchedLifelinesTest, LifelinesWorkWithoutAWatchOfTheKernel) {
  const Listener listener;
  Lifelines lines([](int /*fd*/, UniqueFunction<void()> /*onReadable*/) { throw std::runtime_error("no room"); });
  Member member;
  member.session = 7;
  member.lifelineHost = "127.0.0.1";
  member.lifelinePort = listener.port();
  lines.connect(member, [] { FAIL() << "nothing was looked at"; });
  lines.forget(member);
}

} // namespace
} // namespace torch_ucx_rpc
