// How a worker decides that a peer is gone, and tells observers.

#include "rpc/peer_monitor.h"

#include "agent_parts_of.h"
#include "base/proc.h"
#include "handlers.h"
#include "sending_transport.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using std::chrono::milliseconds;
using State = Peer::State;
using Notes = std::vector<std::string>;

constexpr milliseconds kLimit(1000); // of silence

class PeerMonitorTest : public testing::Test {
 protected:
  // Notes each peer that ends, and its state at that moment.
  class Observer final : public PeerObserver {
   public:
    Observer(std::string name, Notes& notes) : name_(std::move(name)), notes_(notes) {}
    void onPeerGone(Peer& peer) override {
      notes_.push_back(name_ + ": " + peer.member().name + (peer.state() == State::kFailed ? " failed" : " left"));
    }

   private:
    const std::string name_;
    Notes& notes_;
  };

  PeerMonitorTest() {
    mine_.peers = &monitor_;
    monitor_.addObserver(first_);
    monitor_.addObserver(second_);
  }
  ~PeerMonitorTest() override {
    one_.close();
    two_.close();
  }

  Notes takeNotes() {
    return std::exchange(notes_, {});
  }
  // Returns what both observers note of an end.
  static Notes told(const std::string& what) {
    return {"first: " + what, "second: " + what};
  }
  // Lets the heartbeat check `times` times.
  void beat(int times) {
    for (int time = 0; time < times; ++time) {
      one_.advance(kLimit / 20);
    }
  }

  LoopbackNetwork network_;
  Handlers others_;
  Handlers theirs_;
  EventHandlers mine_ = others_.all;
  TestWorker one_{network_, 0, membersOf(3), mine_};
  TestWorker two_{network_, 1, membersOf(3), theirs_.all};
  Notes notes_;
  Observer first_{"first", notes_};
  Observer second_{"second", notes_};
  PeerMonitor monitor_{partsOf(one_), kLimit};
};

TEST_F(PeerMonitorTest, ObserversHearOfAnEndOnceInOrderAfterTheStateHasChanged) {
  Peer& peer = one_.peer(1);
  monitor_.end(peer, State::kFailed, {ErrorCode::kPeerFailed, "first end"});
  EXPECT_EQ(takeNotes(), told("w1 failed"));
  EXPECT_EQ(peer.state(), State::kFailed);
  monitor_.end(peer, State::kFailed, {ErrorCode::kPeerFailed, "second end"});
  monitor_.end(peer, State::kLeft, {ErrorCode::kShutDown, "third end"});
  EXPECT_EQ(takeNotes(), Notes{});
  EXPECT_EQ(peer.whyGone().message(), "first end") << "the first end counts";
  EXPECT_EQ(one_.peer(2).state(), State::kPresent);
}

TEST_F(PeerMonitorTest, GoodbyeEndsAPeerInGoodOrder) {
  two_.messenger.postControl(two_.peer(0), {wire::Kind::kGoodbye});
  one_.takeIn();
  EXPECT_EQ(takeNotes(), told("w1 left"));
  const RpcFailure failed = one_.peer(1).failureOfGone();
  EXPECT_EQ(failed.kind(), RpcFailure::Kind::kWorkerLeft);
  EXPECT_EQ(failed.what(), one_.peer(1).describe() + " has shut down its RPC agent");
  monitor_.onFailure(one_.peer(1), {ErrorCode::kPeerFailed, "its process has ended"});
  EXPECT_EQ(takeNotes(), Notes{}) << "a worker that has left may vanish";
}

TEST_F(PeerMonitorTest, ErrorOfThisProcessEndsNoPeer) {
  for (const ErrorCode code : {ErrorCode::kOutOfMemory, ErrorCode::kOutOfFiles, ErrorCode::kCanceled}) {
    monitor_.onFailure(one_.peer(1), {code, "of this process"});
  }
  EXPECT_EQ(takeNotes(), Notes{});
  EXPECT_EQ(one_.peer(1).state(), State::kPresent);
}

TEST_F(PeerMonitorTest, FailureLosesThePeerAndKeepsTheCause) {
  monitor_.onFailure(one_.peer(1), {ErrorCode::kPeerFailed, "its process has ended"});
  EXPECT_EQ(takeNotes(), told("w1 failed"));
  const RpcFailure failed = one_.peer(1).failureOfGone();
  EXPECT_EQ(failed.kind(), RpcFailure::Kind::kWorkerLost);
  EXPECT_EQ(failed.details().cause, "its process has ended");
}

TEST_F(PeerMonitorTest, EndOfAnEndpointIsAFailure) {
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kLeave});
  network_.kill("address 1");
  one_.takeIn();
  EXPECT_EQ(takeNotes(), told("w1 failed"));
  EXPECT_FALSE(one_.peer(1).hasEnded.load()) << "it may be cut off";
}

TEST_F(PeerMonitorTest, ControlFrameThatDoesNotLeaveLosesThePeer) {
  two_.close(); // this worker has not connected yet
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kAcknowledge});
  EXPECT_EQ(takeNotes(), told("w1 failed")) << "a worker may wait for it";
}

TEST_F(PeerMonitorTest, ClosedAgentLosesNoPeer) {
  one_.lifetime.close();
  monitor_.onFailure(one_.peer(1), {ErrorCode::kPeerFailed, "gone"});
  EXPECT_EQ(takeNotes(), Notes{});
  EXPECT_EQ(one_.peer(1).state(), State::kPresent);
}

TEST_F(PeerMonitorTest, PeersThatVanishAfterAGracefulJoinAreNotLost) {
  EXPECT_FALSE(monitor_.isEverybodyLeaving());
  monitor_.setEverybodyLeaving();
  EXPECT_TRUE(monitor_.isEverybodyLeaving());
  monitor_.onGoodbye(one_.peer(1));
  monitor_.onFailure(one_.peer(2), {ErrorCode::kPeerFailed, "gone"});
  EXPECT_EQ(takeNotes(), Notes{});
}

// ----------------------------------------------------------------------------------------------- this worker's end

TEST_F(PeerMonitorTest, GoodbyeIsHeardByPeersThatWereMetAndByNeighbours) {
  Handlers strangers;
  TestWorker three(network_, 2, membersOf(3), strangers.all);
  const auto heard = [&](Handlers& by, TestWorker& worker) {
    worker.takeIn();
    return by.takeNotes();
  };
  monitor_.sayGoodbye();
  EXPECT_EQ(heard(theirs_, two_), Notes{});
  EXPECT_EQ(heard(strangers, three), Notes{}) << "else each worker of a failing job connects to all others";

  one_.peer(1).isMet.store(true);
  monitor_.sayGoodbye();
  EXPECT_EQ(heard(theirs_, two_), Notes{"goodbye 0"});
  EXPECT_EQ(heard(strangers, three), Notes{});

  one_.peer(2).isNeighbour.store(true);
  monitor_.sayGoodbye();
  EXPECT_EQ(heard(theirs_, two_), Notes{"goodbye 0"});
  EXPECT_EQ(heard(strangers, three), Notes{"goodbye 0"}) << "worker 1 watches this worker's process";
}

TEST_F(PeerMonitorTest, GoodbyeGoesOnlyToOthersThatAreThere) {
  for (Peer* peer : one_.directory.all()) {
    peer->isMet.store(true);
  }
  monitor_.end(one_.peer(1), State::kLeft, {ErrorCode::kShutDown, "it has left"});
  monitor_.sayGoodbye();
  two_.takeIn();
  one_.takeIn();
  EXPECT_EQ(theirs_.takeNotes(), Notes{});
  EXPECT_EQ(one_.peer(0).state(), State::kPresent);
}

TEST_F(PeerMonitorTest, NoWorkerSaysGoodbyeWhenAllLeave) {
  one_.peer(1).isMet.store(true);
  monitor_.setEverybodyLeaving();
  monitor_.sayGoodbye();
  two_.takeIn();
  EXPECT_EQ(theirs_.takeNotes(), Notes{});
}

// ------------------------------------------------------------------------------------------------- silence elsewhere

TEST_F(PeerMonitorTest, EachPeriodRequestsARepairOfSharedMemory) {
  auto owned = std::make_unique<SendingTransport>();
  SendingTransport& transport = *owned;
  TestWorker worker(std::move(owned), 2, membersOf(3), others_.all);
  PeerMonitor monitor(partsOf(worker), kLimit);
  monitor.watch(memberOf(2), {&worker.peer(1)});
  for (int period = 0; period < 10; ++period) {
    worker.advance(kLimit / 20);
  }
  EXPECT_GE(transport.repairs, 8) << "it may have made no call that would time out";
}

TEST_F(PeerMonitorTest, PeerThatAnswersPingsLives) {
  monitor_.watch(memberOf(0), one_.directory.all());
  EXPECT_TRUE(one_.peer(1).needsHeartbeat.load()) << "it is on another machine";
  EXPECT_FALSE(one_.peer(0).needsHeartbeat.load()) << "a worker does not watch itself";
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kAcknowledge}); // makes the endpoint
  for (int time = 0; time < 100; ++time) {
    beat(1);
    two_.takeIn(); // worker 1 answers
    one_.takeIn();
  }
  EXPECT_EQ(takeNotes(), Notes{});
  EXPECT_EQ(one_.peer(1).state(), State::kPresent);
}

TEST_F(PeerMonitorTest, PeerThatStaysSilentIsLostAfterTheLimit) {
  monitor_.watch(memberOf(0), one_.directory.all());
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kAcknowledge});
  beat(20); // the limit, and the time of a retransmission
  EXPECT_EQ(takeNotes(), Notes{});
  beat(20);
  EXPECT_EQ(takeNotes(), told("w1 failed")) << "and not worker 2, which was never spoken to";
  EXPECT_TRUE(one_.peer(1).whyGone().message().find("no sign of life for ") != std::string::npos)
      << one_.peer(1).whyGone().message();
}

TEST_F(PeerMonitorTest, PeerWithAnUnreadMessageIsNotSilent) {
  monitor_.watch(memberOf(0), one_.directory.all());
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kAcknowledge});
  for (int time = 0; time < 100; ++time) {
    two_.messenger.postControl(two_.peer(0), {wire::Kind::kPong});
    beat(1); // worker 0 takes in the message
  }
  EXPECT_EQ(takeNotes(), Notes{});
}

TEST_F(PeerMonitorTest, ClosedAgentPingsNoPeer) {
  monitor_.watch(memberOf(0), one_.directory.all());
  one_.messenger.postControl(one_.peer(1), {wire::Kind::kAcknowledge});
  one_.lifetime.close();
  beat(100);
  EXPECT_EQ(takeNotes(), Notes{});
}

TEST_F(PeerMonitorTest, EndOfALifelineLosesASilentPeerLongBeforeTheLimit) {
  // accept() is never called on this port, but the kernel makes connections.
  int port = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(listen(port, 16), 0); // on all addresses
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(port, reinterpret_cast<sockaddr*>(&address), &size), 0);
  Member member = memberOf(7);
  member.address = "address 1";
  member.lifelineHost = "127.0.0.1";
  member.lifelinePort = ntohs(address.sin_port);
  one_.directory.add(member);
  Peer& peer = one_.peer(7);
  PeerMonitor patient(partsOf(one_), 60 * kLimit);
  patient.addObserver(first_);
  mine_.peers = &patient;
  patient.watch(memberOf(0), {&peer});

  one_.messenger.postControl(peer, {wire::Kind::kAcknowledge}); // makes the endpoint
  peer.connection->silence.heardSinceCheck = true;
  one_.advance(3 * kLimit); // the peer counts as met
  ::close(port);
  // The lifeline ends, and the port refuses another.
  EXPECT_TRUE(one_.messenger.progress().driveUntil([&] { return peer.connection->silence.isDoubted; }, {}));
  EXPECT_EQ(takeNotes(), Notes{});
  one_.advance(3 * kLimit);
  EXPECT_EQ(takeNotes(), Notes{"first: w7 failed"});
  mine_.peers = &monitor_;
}

// --------------------------------------------------------------------------------------- processes of this machine

class WatchedProcessTest : public PeerMonitorTest {
 protected:
  // Starts a process that ends when its pipe is closed, and makes its member.
  WatchedProcessTest() {
    EXPECT_EQ(pipe(pipe_), 0);
    child_ = fork();
    if (child_ == 0) {
      ::close(pipe_[1]);
      char byte = 0;
      (void)!read(pipe_[0], &byte, 1);
      _exit(0);
    }
    ::close(pipe_[0]);
    self_ = memberOf(0);
    Member member = memberOf(7);
    member.bootId = self_.bootId;
    member.pid = child_;
    const auto stat = readProcStat("/proc/" + std::to_string(child_));
    EXPECT_TRUE(stat.has_value());
    member.processStartTime = stat ? stat->startTicks : 0;
    one_.directory.add(member);
  }
  ~WatchedProcessTest() override {
    endProcess();
    one_.close();
  }
  void endProcess() {
    if (child_ != 0) {
      ::close(pipe_[1]);
      EXPECT_EQ(waitpid(child_, nullptr, 0), child_);
      child_ = 0;
    }
  }

  int pipe_[2] = {-1, -1};
  pid_t child_ = 0;
  Member self_;
};

TEST_F(WatchedProcessTest, EndOfAProcessIsSeenWithoutAnyMessage) {
  monitor_.watch(self_, {&one_.peer(7)});
  EXPECT_FALSE(one_.peer(7).needsHeartbeat.load());
  endProcess();
  one_.lead(); // sleeps until the process has ended
  EXPECT_EQ(takeNotes(), told("w7 failed"));
  EXPECT_EQ(one_.peer(7).failureOfGone().details().cause, "its process has ended");
  EXPECT_TRUE(one_.peer(7).hasEnded.load());
}

TEST_F(WatchedProcessTest, ProcessThatHasEndedBeforeIsLostAtOnce) {
  endProcess();
  monitor_.watch(self_, {&one_.peer(7)});
  EXPECT_EQ(takeNotes(), told("w7 failed"));
}

TEST_F(WatchedProcessTest, PeerIsWatchedOnce) {
  monitor_.watch(self_, {&one_.peer(7)});
  endProcess();
  monitor_.watch(self_, {&one_.peer(7)});
  EXPECT_EQ(takeNotes(), Notes{}) << "it is not watched again";
  one_.lead();
  EXPECT_EQ(takeNotes(), told("w7 failed"));
}

} // namespace
} // namespace torch_ucx_rpc
