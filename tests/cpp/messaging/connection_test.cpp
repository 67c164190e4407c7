// The states of a connection, and the connections that a round handles.

#include "messaging/connection.h"

#include "assume_worker_lock.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using State = Connection::State;
using Event = Connection::Event;

class ConnectionTest : public testing::Test {
 protected:
  static void connect(Connection& connection, EndpointId endpoint = 0) {
    connection.setEndpoint(endpoint);
  }
  static void disconnect(Connection& connection) {
    connection.setEndpoint(std::nullopt);
  }
  // Returns the connections of one round.
  std::vector<Connection*> round() {
    std::vector<Connection*> seen;
    connections_.forEachReady([&](Connection& connection) { seen.push_back(&connection); });
    return seen;
  }

  const AssumeWorkerLock lock_;
  Connections connections_;
  Peer peer_{memberOf(1)};
  Peer other_{memberOf(2)};
};

TEST_F(ConnectionTest, IsMadeOnceForAPeer) {
  EXPECT_EQ(peer_.connection, nullptr);
  Connection& connection = connections_.of(peer_);
  EXPECT_EQ(peer_.connection, &connection);
  EXPECT_EQ(&connections_.of(peer_), &connection);
  EXPECT_EQ(&connection.peer(), &peer_);
  EXPECT_EQ(connection.state(), State::kUnmet);
}

TEST_F(ConnectionTest, IsOpenWhileItHasAnEndpoint) {
  Connection& connection = connections_.of(peer_);
  connect(connection);
  EXPECT_EQ(connection.state(), State::kOpen);
  disconnect(connection);
  EXPECT_EQ(connection.state(), State::kUnmet);
  connect(connection, 1);
  EXPECT_EQ(connection.state(), State::kOpen);
}

// The receiver may leave an announced value at its sender for as long as it likes.
TEST_F(ConnectionTest, AnAnnouncedFrameHidesNoMissingOne) {
  Connection& connection = connections_.of(peer_);
  Connection::Incoming& incoming = connection.incoming;
  EXPECT_TRUE(incoming.received.accept(1));
  EXPECT_EQ(incoming.lacking(), 0u);
  EXPECT_TRUE(incoming.received.accept(5));
  EXPECT_EQ(incoming.lacking(), 2u);
  for (const uint64_t number : {2, 3}) {
    incoming.announced.emplace(number, Announcement{&connection, number, nullptr, true});
  }
  EXPECT_EQ(incoming.lacking(), 4u);
  incoming.announced.emplace(4, Announcement{&connection, 4, nullptr, true});
  EXPECT_EQ(incoming.lacking(), 0u);
}

TEST_F(ConnectionTest, ResumesAfterABreakIfItMay) {
  Connection& connection = connections_.of(peer_);
  connect(connection);
  EXPECT_FALSE(connection.mayResume());
  peer_.mayResume.store(true);
  EXPECT_TRUE(connection.mayResume());
  connection.breakOff("a reset");
  EXPECT_EQ(connection.state(), State::kResuming);
  EXPECT_FALSE(connection.endpoint().has_value());
  EXPECT_TRUE(connection.mustRetry());
  EXPECT_EQ(connection.roundsToResume, 1u);
  for (int failure = 1; failure < 20; ++failure) { // no endpoint has carried a message
    connect(connection, 1);
    EXPECT_EQ(connection.state(), State::kOpen);
    connection.breakOff("a reset");
    EXPECT_EQ(connection.roundsToResume, failure < 5 ? 1u << failure : 32u);
  }
  EXPECT_EQ(peer_.timesResumed.load(), 1u);
}

TEST_F(ConnectionTest, ResumesToJoinEvenWhereCallsDoNotOutlastABreak) {
  Connection& connection = connections_.of(peer_);
  peer_.isEndSeen.store(true);
  EXPECT_FALSE(connection.mayResume());
  peer_.hasAdmitted.store(false);
  EXPECT_TRUE(connection.isJoining() && connection.mayResume());
  ASSERT_TRUE(peer_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  EXPECT_FALSE(connection.isJoining() || connection.mayResume());
}

TEST_F(ConnectionTest, SilenceLastsWhileEndpointsFailInARow) {
  Connection& connection = connections_.of(peer_);
  connect(connection);
  connection.silence.lasted = std::chrono::milliseconds(5);
  connection.breakOff("a reset");
  EXPECT_EQ(connection.silence.lasted.count(), 0) << "the connection worked until then";
  connection.silence.lasted = std::chrono::milliseconds(9000);
  connect(connection);
  connection.breakOff("its host cannot be reached");
  EXPECT_EQ(connection.silence.lasted.count(), 9000);
  EXPECT_TRUE(connection.silence.isSuspect);
}

TEST_F(ConnectionTest, IsClosedForGoodWhenThePeerIsGone) {
  Connection& connection = connections_.of(peer_);
  connect(connection);
  ASSERT_TRUE(peer_.moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, "it leaves"}));
  EXPECT_EQ(connection.state(), State::kOpen) << "it still answers";
  ASSERT_TRUE(peer_.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  EXPECT_EQ(connection.state(), State::kClosed);
  connection.transition(Event::kBroken);
  EXPECT_EQ(connection.state(), State::kClosed);
  disconnect(connection);
  connect(connection);
  EXPECT_EQ(connection.state(), State::kClosed);
}

TEST_F(ConnectionTest, IsFoundByEachOfItsEndpoints) {
  Connection& connection = connections_.of(peer_);
  connections_.of(other_);
  EXPECT_EQ(connections_.find(3), nullptr);
  connect(connection, 3);
  connection.paths.emplace_front();
  connect(connection, 4);
  EXPECT_EQ(connections_.find(3), &connection);
  EXPECT_EQ(connections_.find(4), &connection);
  EXPECT_EQ(connections_.find(5), nullptr);
}

TEST_F(ConnectionTest, RoundSeesEachReadyConnectionOnce) {
  Connection& connection = connections_.of(peer_);
  Connection& other = connections_.of(other_);
  EXPECT_TRUE(round().empty());
  connections_.makeReady(connection);
  connections_.keepLooking(connection);
  connections_.keepLooking(other);
  EXPECT_TRUE(connections_.hasReady());
  EXPECT_EQ(round(), (std::vector<Connection*>{&connection, &other}));
  EXPECT_FALSE(connections_.hasReady());
  EXPECT_TRUE(round().empty());
}

TEST_F(ConnectionTest, ConnectionThatIsOnlyLookedAtIsNotReady) {
  Connection& connection = connections_.of(peer_);
  connections_.keepLooking(connection);
  EXPECT_FALSE(connections_.hasReady());
  connections_.makeReady(connection);
  EXPECT_TRUE(connections_.hasReady());
}

TEST_F(ConnectionTest, ConnectionMadeReadyInARoundIsSeenInTheNext) {
  Connection& connection = connections_.of(peer_);
  connections_.makeReady(connection);
  int seen = 0;
  connections_.forEachReady([&](Connection& ready) {
    ++seen;
    connections_.makeReady(ready);
  });
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(connections_.hasReady());
  EXPECT_EQ(round(), std::vector<Connection*>{&connection});
}

// A callback of the transport may run out of memory.
TEST_F(ConnectionTest, RoundThatThrowsLeavesTheOthersReady) {
  connections_.makeReady(connections_.of(peer_));
  connections_.makeReady(connections_.of(other_));
  EXPECT_THROW(
      connections_.forEachReady([&](Connection& connection) {
        connections_.makeReady(connection);
        throw std::runtime_error("no memory");
      }),
      std::runtime_error);
  EXPECT_EQ(round(), (std::vector<Connection*>{peer_.connection, other_.connection}));
  EXPECT_TRUE(round().empty());
}

} // namespace
} // namespace torch_ucx_rpc
