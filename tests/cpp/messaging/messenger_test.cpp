// Messages between two workers that consist of only a Messenger: arrivals, events and ends.

#include "messaging/messenger.h"

#include "handlers.h"
#include "sending_transport.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using std::chrono::milliseconds;
using wire::Kind;
using Fate = LoopbackNetwork::Fate;
using Notes = std::vector<std::string>;

constexpr uint64_t kWindow = 100'000;
constexpr size_t kLarge = OutgoingMessage::kEagerBodyBytes + 1;

Error copyOrFail(OutgoingMessage& message, IncomingMessage& /*arrived*/) {
  return message.spans.empty() ? Error() : Error(ErrorCode::kOutOfMemory, "no memory for a copy");
}

class MessengerTest : public testing::Test {
 protected:
  ~MessengerTest() override {
    network_.setFault({});
    handlers_[0].requests.clear();
    handlers_[1].requests.clear();
  }

  // From worker 0 to worker 1.
  void post(Kind kind, uint64_t callId, size_t bodyBytes = 4, std::span<const std::byte> span = {}) {
    one_.messenger.post(one_.peer(1), kind, callId, makeOutgoing(bodyBytes, span));
  }
  // Lets the handlers of worker 1 return. Waiting messages that then fit may arrive at once.
  void finishRequests() {
    (void)std::exchange(handlers_[1].requests, {});
  }
  void exchangeAll() {
    exchange(one_, two_);
  }
  void fault(Kind kind, Fate fate) {
    network_.setFault(
        [=](const wire::Header& header, SendMode /*mode*/) { return header.kind == kind ? fate : Fate::kDeliver; });
  }

  LoopbackNetwork network_;
  Handlers handlers_[2];
  TestWorker one_{network_, 0, membersOf(2), handlers_[0].all, &copyOrFail, kWindow};
  TestWorker two_{network_, 1, membersOf(2), handlers_[1].all, &copyOrFail, kWindow};
};

// ------------------------------------------------------------------------------------------------- whole messages

TEST_F(MessengerTest, MessageArrivesWholeWithItsAddressing) {
  const Bytes span = [] {
    Bytes bytes(50'000);
    std::fill_n(bytes.data(), bytes.size(), std::byte{7});
    return bytes;
  }();
  post(Kind::kRequest, 42, 10, span);
  exchangeAll();
  ASSERT_EQ(handlers_[1].takeNotes(), Notes{"request 42"});
  const IncomingMessage& request = handlers_[1].requests[0];
  EXPECT_EQ(request.from, &two_.peer(0));
  EXPECT_EQ(request.header.sourceSession, one_.identity.session);
  EXPECT_EQ(request.header.sourceRank, 0u);
  EXPECT_EQ(request.header.targetSession, two_.identity.session);
  EXPECT_EQ(request.body().size(), 10u);
  ASSERT_EQ(request.spans.size(), 1u);
  const std::span<const std::byte> arrived(static_cast<const std::byte*>(request.spans[0].data.get()), 50'000);
  EXPECT_TRUE(std::ranges::equal(arrived, std::span<const std::byte>(span)));
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{}) << "an arrival is not reported to the sender";
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(MessengerTest, LargeBodyIsFetchedIntoTheWindow) {
  post(Kind::kRequest, 1, kLarge);
  EXPECT_EQ(one_.messenger.traffic().underWay, 1u);
  exchangeAll();
  ASSERT_EQ(handlers_[1].takeNotes(), Notes{"request 1"});
  EXPECT_EQ(handlers_[1].requests[0].body().size(), kLarge);
  EXPECT_EQ(two_.messenger.window().inUseBytes(), kLarge);
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(MessengerTest, ControlFramesReachTheirHandlersInOrder) {
  for (const Kind kind : {Kind::kLeave, Kind::kAcknowledge, Kind::kGoodbye}) {
    one_.messenger.postControl(one_.peer(1), {kind});
  }
  one_.messenger.postControl(one_.peer(1), barrierArrive(9, {{{0, 3}}, {}}));
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), (Notes{"leave 0", "acknowledge 0", "goodbye 0", "arrive 9"}));
}

TEST_F(MessengerTest, MessageThatCannotBeSentIsReportedOnce) {
  network_.setFault([](const wire::Header&, SendMode) { return Fate::kFail; });
  const std::string why = "loopback: the send was made to fail";
  post(Kind::kRequest, 1);
  post(Kind::kResponse, 2);
  post(Kind::kRequest, 3, kLarge);
  one_.messenger.postControl(one_.peer(1), {Kind::kLeave});
  exchangeAll();
  EXPECT_EQ(
      handlers_[0].takeNotes(),
      (Notes{
          "request not sent: " + why + " 1",
          "answer not sent: " + why + " 2",
          "request not sent: " + why + " 3",
          "control not sent: " + why + " 1"}));
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{});
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(MessengerTest, StagedBytesAreCounted) {
  testing::internal::CaptureStderr();
  for (int time = 0; time < 2; ++time) {
    std::unique_ptr<OutgoingMessage> message = makeOutgoing(1);
    message->stagedBytes = 500;
    one_.messenger.post(one_.peer(1), Kind::kRequest, 1, std::move(message));
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(one_.messenger.stagedBytes(), 1000u);
  EXPECT_NE(log.find("cannot share with another process"), std::string::npos) << log;
  EXPECT_EQ(log.find("before 1.22"), std::string::npos) << "no UCX shares expandable_segments: " << log;
  for (const char* cause : {"cudaMallocAsync", "expandable_segments", "UCX_TLS", "PID namespace"}) {
    EXPECT_NE(log.find(cause), std::string::npos) << log;
  }
  EXPECT_EQ(log.find("This is said once"), log.rfind("This is said once")) << log;
}

// ------------------------------------------------------------------------------------------------------- to oneself

TEST_F(MessengerTest, MessageToOneselfArrivesAtOnceAndSkipsTheTransport) {
  Peer& self = one_.peer(0);
  one_.messenger.post(self, Kind::kRequest, 1, makeOutgoing(5));
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request 1"});
  EXPECT_EQ(handlers_[0].requests[0].from, &self);
  EXPECT_EQ(handlers_[0].requests[0].body().size(), 5u);
  one_.messenger.post(self, Kind::kResponse, 1, makeOutgoing(5));
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"answer 1"});
  EXPECT_EQ(self.connection, nullptr);
}

TEST_F(MessengerTest, MessageToOneselfThatCannotBeCopiedIsRejected) {
  const Bytes span(10);
  one_.messenger.post(one_.peer(0), Kind::kRequest, 1, makeOutgoing(5, span));
  one_.messenger.post(one_.peer(0), Kind::kResponse, 2, makeOutgoing(5, span));
  EXPECT_EQ(
      handlers_[0].takeNotes(),
      (Notes{"request rejected: no memory for a copy 1", "answer rejected: no memory for a copy 2"}));
}

// --------------------------------------------------------------------------------------------------------- giving up

TEST_F(MessengerTest, CanceledRequestIsNotTakenInByItsCallee) {
  post(Kind::kRequest, 1, kLarge);
  one_.messenger.cancel({{&one_.peer(1), 1}});
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{}) << "its caller waits no longer";
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{});
}

TEST_F(MessengerTest, RequestThatHasNotLeftIsGivenUpHere) {
  for (uint64_t call = 0; call <= PushShare::kMaxParts; ++call) {
    post(Kind::kRequest, call, kLarge);
  }
  one_.messenger.cancel({{&one_.peer(1), PushShare::kMaxParts}});
  EXPECT_EQ(
      handlers_[0].takeNotes(),
      Notes{"request not sent: its call was given up " + std::to_string(PushShare::kMaxParts)});
  EXPECT_EQ(one_.messenger.traffic().underWay, PushShare::kMaxParts);
}

TEST_F(MessengerTest, EverythingUnderWayToAPeerThatIsGoneEnds) {
  post(Kind::kRequest, 1, kLarge);
  ASSERT_TRUE(one_.peer(1).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  one_.messenger.onPeerGone(one_.peer(1));
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request not sent: the endpoint was abandoned 1"});
  post(Kind::kRequest, 2);
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request not sent: it died 2"});
}

TEST_F(MessengerTest, AnnouncementsOfALostPeerAreForgotten) {
  post(Kind::kRequest, 1, 3 * kWindow); // it takes the whole window
  post(Kind::kRequest, 2, kLarge);
  exchangeAll();
  ASSERT_EQ(handlers_[1].takeNotes(), Notes{"request 1"});
  ASSERT_EQ(two_.messenger.window().waitingMessages.load(), 1u);
  ASSERT_TRUE(two_.peer(0).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  two_.messenger.onPeerGone(two_.peer(0));
  EXPECT_EQ(two_.messenger.window().waitingMessages.load(), 0u);
  finishRequests();
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{});
}

// ----------------------------------------------------------------------------------------------- failures, liveness

TEST_F(MessengerTest, FailureTakesItsTurnAfterEverythingThatHasArrived) {
  post(Kind::kRequest, 1);
  two_.messenger.progress().submit([this] {
    two_.messenger.addFailureWithWorkerLock(two_.peer(0), {ErrorCode::kPeerFailed, "its process has ended"});
    two_.messenger.drainTransportWithWorkerLock();
  });
  EXPECT_EQ(handlers_[1].takeNotes(), (Notes{"request 1", "failure: its process has ended 0"}));
}

TEST_F(MessengerTest, EndpointThatFailsIsTheFailureOfItsPeer) {
  post(Kind::kRequest, 1);
  network_.kill("address 1");
  one_.takeIn();
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"failure: loopback: 'address 1' was killed 1"});
}

TEST_F(MessengerTest, PingIsAnsweredByTheThreadThatTakesItIn) {
  one_.messenger.postControl(one_.peer(1), {Kind::kPing});
  two_.takeIn();
  EXPECT_FALSE(one_.peer(1).connection->silence.heardSinceCheck);
  one_.takeIn();
  EXPECT_TRUE(one_.peer(1).connection->silence.heardSinceCheck);
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{});
}

TEST_F(MessengerTest, RepairIsTriedAgainUntilItIsComplete) {
  auto owned = std::make_unique<SendingTransport>();
  SendingTransport& transport = *owned;
  TestWorker worker(std::move(owned), 2, membersOf(3), handlers_[0].all);
  transport.repairsNeeded = 3;
  worker.advance(std::chrono::hours(1));
  EXPECT_EQ(transport.repairs, 0) << "no repair was requested";
  worker.messenger.requestRepair();
  worker.messenger.requestRepair();
  worker.advance(milliseconds(0));
  EXPECT_EQ(transport.repairs, 1);
  worker.advance(milliseconds(19));
  EXPECT_EQ(transport.repairs, 1) << "every 20 ms";
  for (int time = 0; time < 10; ++time) {
    worker.advance(milliseconds(20));
  }
  EXPECT_EQ(transport.repairs, 3);
  EXPECT_EQ(transport.scans, 2) << "before each time but the first";
  worker.messenger.requestRepair();
  worker.advance(milliseconds(20));
  EXPECT_EQ(transport.repairs, 4);
}

TEST_F(MessengerTest, DeafWorkerTellsItsNeighboursOverTheNetwork) {
  auto owned = std::make_unique<SendingTransport>();
  SendingTransport& transport = *owned;
  TestWorker worker(std::move(owned), 2, membersOf(3), handlers_[0].all);
  worker.peer(1).isNeighbour.store(true);
  transport.repairsNeeded = 1000;
  transport.notWhole = RepairState::kUnrepairable;
  transport.networkError = {ErrorCode::kOutOfFiles, "too many files"};
  testing::internal::CaptureStderr();
  worker.messenger.requestRepair();
  worker.advance(milliseconds(20));
  EXPECT_EQ(transport.begun, 0u);
  transport.networkError = {};
  for (int time = 0; time < 10; ++time) {
    worker.advance(milliseconds(20));
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("use the network"), std::string::npos);
  EXPECT_EQ(transport.connected, Notes{"address 1 over the network"}) << "and no other";
  ASSERT_EQ(transport.begun, 1u) << "once";
  EXPECT_EQ(transport.sent[0].header.kind, Kind::kUseNetwork);
}

TEST_F(MessengerTest, NeighbourOfADeafWorkerUsesTheNetworkToo) {
  two_.peer(0).isNeighbour.store(true);
  one_.messenger.postControl(one_.peer(1), {Kind::kUseNetwork});
  exchangeAll();
  EXPECT_TRUE(two_.peer(0).isOverNetwork.load());
  EXPECT_FALSE(one_.peer(1).isOverNetwork.load()) << "the deaf worker has moved already";
  two_.messenger.postControl(two_.peer(0), {Kind::kUseNetwork});
  exchangeAll();
  EXPECT_FALSE(one_.peer(1).isOverNetwork.load()) << "a peer of another machine has no shared memory to leave";
}

TEST_F(MessengerTest, TwoDeafNeighboursTellEachOtherOnce) {
  one_.peer(1).isNeighbour.store(true);
  two_.peer(0).isNeighbour.store(true);
  network_.makeDeaf();
  int told = 0;
  network_.setFault([&](const wire::Header& header, SendMode /*mode*/) {
    told += header.kind == Kind::kUseNetwork;
    return Fate::kDeliver;
  });
  testing::internal::CaptureStderr();
  for (TestWorker* worker : {&one_, &two_}) {
    worker->messenger.requestRepair();
    worker->advance(milliseconds(20));
  }
  exchangeAll();
  (void)testing::internal::GetCapturedStderr();
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(one_.peer(1).isOverNetwork.load());
  EXPECT_TRUE(two_.peer(0).isOverNetwork.load());
}

// ------------------------------------------------------------------------------------------------------------- joins

TEST_F(MessengerTest, JoinOfAStrangerIsRefusedUntilJoinsAreAccepted) {
  Handlers handlers;
  TestWorker stranger(network_, 2, membersOf(3), handlers.all);
  testing::internal::CaptureStderr();
  stranger.messenger.postControl(stranger.peer(1), {Kind::kJoin});
  two_.takeIn();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("not a worker of this job"), std::string::npos);
  EXPECT_EQ(two_.messenger.refusedFrames(), 1u);
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{});
  two_.messenger.acceptJoins({});
  stranger.messenger.postControl(stranger.peer(1), {Kind::kJoin});
  two_.takeIn();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"join " + std::to_string(stranger.identity.session)});
  EXPECT_EQ(two_.messenger.refusedFrames(), 1u);
}

TEST_F(MessengerTest, MessagesWaitUntilThePeerHasAdmittedThisWorker) {
  two_.messenger.acceptJoins({});
  one_.peer(1).hasAdmitted.store(false);
  one_.messenger.postControl(one_.peer(1), {Kind::kJoin});
  post(Kind::kRequest, 1);
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"join " + std::to_string(one_.identity.session)});
  one_.messenger.onAdmitted(one_.peer(1));
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request 1"});
}

// ------------------------------------------------------------------------------------------------- the receive window

TEST_F(MessengerTest, MessageBeyondTheWindowWaitsUntilThereIsRoom) {
  post(Kind::kRequest, 1, kLarge);
  post(Kind::kRequest, 2, kLarge);
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request 1"}) << "one larger than the window is admitted alone";
  EXPECT_EQ(two_.messenger.window().waitingMessages.load(), 1u);
  finishRequests(); // the first request's handler returns
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request 2"});
}

TEST_F(MessengerTest, MessageThatWaitsWhileNothingMovesIsAdmittedAfterAWhile) {
  post(Kind::kRequest, 1, kLarge);
  post(Kind::kRequest, 2, kLarge);
  exchangeAll();
  ASSERT_EQ(handlers_[1].takeNotes(), Notes{"request 1"});
  two_.advance(ReceiveWindow::kPatience); // the first check
  two_.advance(ReceiveWindow::kPatience - milliseconds(1));
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{});
  two_.advance(ReceiveWindow::kPatience / 2);
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request 2"}) << "handlers wait for one another";
}

// ------------------------------------------------------------------------------------------------------------- content

TEST_F(MessengerTest, ContentThatItsSenderDidNotSealIsRefusedAndCounted) {
  Member member = memberOf(1);
  member.sendKey = "send key of thirty-two bytes....";
  member.receiveKey = "receive key of thirty-two bytes.";
  Peer sealed(member);
  IncomingMessage message;
  message.from = &sealed;
  message.pooledBody = HostPool::instance().allocate(100);
  message.pooledBodyBytes = 100;
  const Error error = one_.messenger.checkContent(message);
  EXPECT_EQ(error.code(), ErrorCode::kProtocol);
  EXPECT_NE(error.message().find(sealed.describe()), std::string::npos) << error.message();
  EXPECT_EQ(one_.messenger.refusedFrames(), 1u);
  message.from = &one_.peer(1);
  EXPECT_FALSE(one_.messenger.checkContent(message)) << "a job without a secret";
  EXPECT_EQ(one_.messenger.refusedFrames(), 1u);
}

// ------------------------------------------------------------------------------------------------------------- driving

TEST_F(MessengerTest, LeaderRunsShortRequestsItself) {
  handlers_[1].shortRequest = 1;
  post(Kind::kRequest, 1);
  two_.lead();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request on the driver 1"});
  post(Kind::kRequest, 1);
  two_.takeIn();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request 1"}) << "a thread that only submits may hold locks of torch's";
}

TEST_F(MessengerTest, WaitingCallerCompletesItsOwnAnswer) {
  two_.messenger.post(two_.peer(0), Kind::kResponse, 5, makeOutgoing(1));
  bool isDone = false;
  Notes notes;
  while (!isDone) {
    ASSERT_TRUE(one_.messenger.progress().driveUntil(
        [&] {
          for (std::string& note : handlers_[0].takeNotes()) {
            notes.push_back(std::move(note));
          }
          isDone = notes.size() == 2;
          return isDone;
        },
        5));
  }
  EXPECT_EQ(notes, (Notes{"answer 5", "completed by the driver 5"}));
}

// --------------------------------------------------------------------------------------------- reports and the end

TEST_F(MessengerTest, LanesAreKnownFromTheFirstMessageOn) {
  const std::vector<const Peer*> peers{&one_.peer(0), &one_.peer(1)};
  EXPECT_EQ(one_.messenger.traffic(peers).lanes, (std::vector<std::vector<std::string>>{{}, {}}));
  post(Kind::kRequest, 1);
  EXPECT_EQ(one_.messenger.traffic(peers).lanes, (std::vector<std::vector<std::string>>{{}, {"loopback/memory"}}));
  EXPECT_EQ(one_.messenger.address(), "address 0");
}

TEST_F(MessengerTest, EverythingEndsWithClose) {
  post(Kind::kRequest, 1, kLarge);
  one_.close();
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request not sent: the endpoint was abandoned 1"}) << "the end is reported";
  post(Kind::kRequest, 2);
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request not sent: RPC has been shut down on this worker 2"});
  exchangeAll();
  EXPECT_EQ(handlers_[1].takeNotes(), Notes{"request rejected: loopback: the sender is gone 1"});
}

} // namespace
} // namespace torch_ucx_rpc
