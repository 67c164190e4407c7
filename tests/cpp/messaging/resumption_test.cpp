// Messages between two messengers whose connections are reset. Each message arrives once, over any endpoint.

#include "messaging/messenger.h"

#include "handlers.h"
#include "messaging/control_frames.h"
#include "runtime/worker_mutex.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using std::chrono::milliseconds;
using wire::Kind;
using Fate = LoopbackNetwork::Fate;
using Notes = std::vector<std::string>;

constexpr size_t kLarge = OutgoingMessage::kEagerBodyBytes + 1;

class ResumptionTest : public testing::Test {
 protected:
  ResumptionTest() {
    one_.peer(1).mayResume.store(true);
    two_.peer(0).mayResume.store(true);
  }
  ~ResumptionTest() override {
    network_.setFault({});
    handlers_[0].requests.clear();
    handlers_[1].requests.clear();
  }

  // From worker 0 to worker 1.
  void post(Kind kind, uint64_t callId, size_t bodyBytes = 4, std::span<const std::byte> span = {}) {
    one_.messenger.post(one_.peer(1), kind, callId, makeOutgoing(bodyBytes, span));
  }
  void exchangeAll() {
    exchange(one_, two_);
  }
  // Lets enough time pass for another endpoint, or for a separate frame with an acknowledgement.
  void wait(milliseconds time = milliseconds(25)) {
    one_.advance(time);
    two_.advance(time);
    exchangeAll();
  }
  void waitASecond() {
    for (int round = 0; round < 40; ++round) {
      wait();
    }
  }
  void reset(Rank from) {
    network_.reset(memberOf(from).address, memberOf(static_cast<Rank>(1 - from)).address);
  }
  // Worker 0 loses its endpoint while worker 1 receives request 1, and 1 s passes.
  void resetSenderDuringAReceive() {
    two_.messenger.postControl(two_.peer(0), {Kind::kPong}); // makes an endpoint
    network_.stallReceives(true);
    post(Kind::kRequest, 1, kLarge);
    exchangeAll();
    network_.stallReceives(false);
    reset(0);
    waitASecond();
  }
  Notes notesOfTwo() {
    return handlers_[1].takeNotes();
  }

  LoopbackNetwork network_;
  Handlers handlers_[2];
  TestWorker one_{network_, 0, membersOf(2), handlers_[0].all};
  TestWorker two_{network_, 1, membersOf(2), handlers_[1].all};
};

TEST_F(ResumptionTest, MessageOnTheWayAtAResetArrivesOverAnotherEndpoint) {
  post(Kind::kRequest, 1);
  reset(0);
  exchangeAll();
  EXPECT_EQ(notesOfTwo(), Notes{}) << "the reset has lost it";
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"broken 1"});
  EXPECT_TRUE(one_.peer(1).isResuming.load());
  EXPECT_EQ(one_.messenger.traffic().underWay, 1u) << "a worker that leaves waits for it";
  wait();
  EXPECT_EQ(notesOfTwo(), Notes{"request 1"});
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u);
}

TEST_F(ResumptionTest, MessageThatHasArrivedIsNotDeliveredAgain) {
  post(Kind::kRequest, 1);
  two_.takeIn();
  ASSERT_EQ(notesOfTwo(), Notes{"request 1"});
  EXPECT_GT(one_.peer(1).resendBytes.load(), 0u) << "nothing has acknowledged it";
  reset(0);
  exchangeAll();
  wait();
  EXPECT_EQ(notesOfTwo(), Notes{});
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

TEST_F(ResumptionTest, FrameOfAnEarlierEndpointThatComesLateIsDropped) {
  network_.setFault([](const wire::Header&, SendMode) { return Fate::kHold; });
  post(Kind::kRequest, 1);
  network_.setFault({});
  reset(0);
  exchangeAll();
  wait();
  ASSERT_EQ(notesOfTwo(), Notes{"request 1"});
  network_.releaseHeld();
  exchangeAll();
  EXPECT_EQ(notesOfTwo(), Notes{});
}

TEST_F(ResumptionTest, BodyThatWasAnnouncedIsFetchedOverAnotherEndpoint) {
  const Bytes span(50'000);
  post(Kind::kRequest, 1, kLarge, span);
  two_.messenger.progress().submit([this] {}); // the announcement arrives, but nothing is fetched yet
  reset(0);
  exchangeAll();
  wait();
  ASSERT_EQ(notesOfTwo(), Notes{"request 1"});
  EXPECT_EQ(handlers_[1].requests[0].body().size(), kLarge);
  EXPECT_EQ(handlers_[1].requests[0].spans[0].bytes, 50'000u);
  wait();
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

TEST_F(ResumptionTest, MissingMessagesAreSentAgainWhenThePeerAsks) {
  network_.setFault([](const wire::Header&, SendMode) { return Fate::kDrop; });
  post(Kind::kRequest, 1);
  network_.setFault({});
  post(Kind::kRequest, 2);
  exchangeAll();
  ASSERT_EQ(notesOfTwo(), Notes{"request 2"});
  wire::ReplayWindow received(1);
  ASSERT_TRUE(received.accept(2));
  two_.messenger.postControl(two_.peer(0), {Kind::kReceived, 0, encodeReceived(received, true)});
  exchangeAll();
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"broken 1"}) << "it has lost a message, and has delivered a later one";
  wait();
  EXPECT_EQ(notesOfTwo(), Notes{"request 1"});
}

// UCX does this if only the receiver has lost its connection, and has closed its end.
TEST_F(ResumptionTest, AnnouncementsThatAnEndpointDropsComeOverAnotherOne) {
  post(Kind::kRequest, 1);
  two_.messenger.postControl(two_.peer(0), {Kind::kPong}); // makes an endpoint
  exchangeAll();
  reset(1);
  exchangeAll();
  ASSERT_EQ(notesOfTwo(), (Notes{"request 1", "broken 0"}));
  wait();
  network_.setFault([this](const wire::Header& header, SendMode mode) {
    const bool isOfTheFirst = header.sourceRank == 0 && one_.peer(1).timesResumed.load() == 0;
    return isOfTheFirst && mode == SendMode::kRendezvous ? Fate::kDrop : Fate::kDeliver;
  });
  post(Kind::kRequest, 2, kLarge);
  post(Kind::kRequest, 3);
  waitASecond();
  EXPECT_EQ(notesOfTwo(), (Notes{"request 3", "request 2"}));
  EXPECT_EQ(one_.peer(1).timesResumed.load(), 1u);
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

// As UCX does when the sender alone has lost its connection: the receiver's end stays, and its receive does not end.
TEST_F(ResumptionTest, ReceiveOverAnEndpointThatThePeerHasReplacedIsBegunAgain) {
  resetSenderDuringAReceive();
  EXPECT_EQ(notesOfTwo(), (Notes{"broken 0", "request 1"}));
  EXPECT_EQ(two_.peer(0).timesResumed.load(), 1u);
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

// The receiver had made more endpoints than the sender. So UCX itself has made the receiver's end of the connection.
TEST_F(ResumptionTest, ReceiveOverAnEndpointMadeByUcxIsBegunAgain) {
  network_.makeOriginsInternal();
  resetSenderDuringAReceive();
  EXPECT_EQ(notesOfTwo(), Notes{"request 1"});
  EXPECT_EQ(two_.peer(0).timesResumed.load(), 0u) << "its own endpoint is good";
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

TEST_F(ResumptionTest, SlowReceiveOutlastsAnotherAnnouncementOverItsEndpoint) {
  two_.messenger.postControl(two_.peer(0), {Kind::kPong}); // makes an endpoint
  network_.stallReceives(true);
  network_.setFault([](const wire::Header&, SendMode) { return Fate::kDuplicate; });
  post(Kind::kRequest, 1, kLarge);
  waitASecond();
  EXPECT_EQ(two_.peer(0).timesResumed.load(), 0u);
}

TEST_F(ResumptionTest, LateAnnouncementOverAnEarlierEndpointIsVoid) {
  two_.messenger.postControl(two_.peer(0), {Kind::kPong}); // makes an endpoint
  network_.setFault([](const wire::Header&, SendMode) { return Fate::kHold; });
  post(Kind::kRequest, 1, kLarge);
  network_.setFault({});
  reset(0);
  network_.stallReceives(true);
  wait();
  network_.releaseHeld();
  waitASecond();
  EXPECT_EQ(two_.peer(0).timesResumed.load(), 0u) << "the endpoint over which the receive has begun is good";
}

// The new announcement is lost, but a later frame shows that there is a new endpoint.
TEST_F(ResumptionTest, ReceiveOverAReplacedEndpointEndsWithoutAnAnnouncement) {
  network_.makeOriginsInternal();
  two_.messenger.postControl(two_.peer(0), {Kind::kPong}); // makes an endpoint
  network_.stallReceives(true);
  post(Kind::kRequest, 1, kLarge);
  exchangeAll();
  network_.stallReceives(false);
  size_t announced = 0;
  network_.setFault([&announced](const wire::Header&, SendMode mode) {
    return mode == SendMode::kRendezvous && announced++ == 0 ? Fate::kDrop : Fate::kDeliver;
  });
  reset(0);
  post(Kind::kRequest, 2);
  waitASecond();
  waitASecond();
  EXPECT_EQ(notesOfTwo(), (Notes{"request 2", "request 1"}));
}

TEST_F(ResumptionTest, AnswerAcknowledgesItsRequestAndIsItselfAcknowledgedLater) {
  post(Kind::kRequest, 1);
  exchangeAll();
  two_.messenger.post(two_.peer(0), Kind::kResponse, 1, makeOutgoing(4));
  exchangeAll();
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
  EXPECT_EQ(two_.peer(0).resendBytes.load(), 4u);
  wait();
  EXPECT_EQ(two_.peer(0).resendBytes.load(), 0u);
}

TEST_F(ResumptionTest, KeptEagerBodiesAreBoundedAndTheRestCanBeCanceled) {
  network_.setFault([](const wire::Header& header, SendMode) {
    return header.kind == Kind::kReceived ? Fate::kDrop : Fate::kDeliver; // as if the peer were stopped
  });
  constexpr size_t kBody = 60'000;
  for (uint64_t call = 0; call < 1000; ++call) {
    post(Kind::kRequest, call, kBody);
  }
  exchangeAll();
  EXPECT_LE(one_.peer(1).resendBytes.load(), OutgoingLoad::kMaxEagerBytes);
  const size_t arrived = notesOfTwo().size();
  EXPECT_GT(arrived, 100u);
  EXPECT_LT(arrived, 200u);
  one_.messenger.cancel({{&one_.peer(1), 999}});
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"request not sent: its call was given up 999"});
}

TEST_F(ResumptionTest, CallsDuringThePauseWaitAndCanBeCanceled) {
  post(Kind::kRequest, 1);
  exchangeAll();
  reset(0);
  exchangeAll();
  post(Kind::kRequest, 2);
  post(Kind::kRequest, 3);
  one_.messenger.postControl(one_.peer(1), {Kind::kLeave});
  one_.messenger.cancel({{&one_.peer(1), 2}});
  EXPECT_EQ(handlers_[0].takeNotes(), (Notes{"broken 1", "request not sent: its call was given up 2"}));
  wait();
  Notes notes = notesOfTwo();
  std::ranges::sort(notes);
  EXPECT_EQ(notes, (Notes{"leave 0", "request 1", "request 3"}));
}

TEST_F(ResumptionTest, EndOfThePeerEndsKeptMessages) {
  std::atomic<int> destroyed{0};
  const Bytes span(50'000);
  one_.messenger.post(
      one_.peer(1), Kind::kRequest, 1, makeOutgoing(4, span, std::make_unique<CountingLender>(destroyed)));
  reset(0);
  exchangeAll();
  ASSERT_TRUE(one_.peer(1).moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, "it died"}));
  one_.messenger.onPeerGone(one_.peer(1));
  one_.advance(milliseconds(25));
  exchangeAll();
  one_.close();
  EXPECT_EQ(destroyed.load(), 1);
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
}

TEST_F(ResumptionTest, CloseEndsKeptMessages) {
  std::atomic<int> destroyed{0};
  const Bytes span(50'000);
  for (const bool isReset : {false, true}) {
    one_.messenger.post(
        one_.peer(1), Kind::kRequest, 1 + isReset, makeOutgoing(4, span, std::make_unique<CountingLender>(destroyed)));
  }
  one_.messenger.post(one_.peer(1), Kind::kRequest, 9, makeOutgoing(4));
  reset(0);
  one_.close();
  EXPECT_EQ(destroyed.load(), 2);
}

TEST_F(ResumptionTest, PeerThatMayNotBeResumedIsLostAtAReset) {
  one_.peer(1).mayResume.store(false);
  post(Kind::kRequest, 1);
  reset(0);
  exchangeAll();
  EXPECT_EQ(
      handlers_[0].takeNotes(), Notes{"failure: loopback: '" + memberOf(1).address + "' has reset the connection 1"});
}

TEST_F(ResumptionTest, JoinLeavesOverEachEndpointUntilThePeerAdmitsThisWorker) {
  one_.peer(1).mayResume.store(false);
  one_.peer(1).isEndSeen.store(true);
  one_.peer(1).hasAdmitted.store(false);
  two_.messenger.acceptJoins({});
  const Notes join{"join " + std::to_string(one_.identity.session)};
  one_.messenger.postControl(one_.peer(1), {Kind::kJoin});
  post(Kind::kRequest, 1);
  reset(0);
  exchangeAll();
  EXPECT_EQ(notesOfTwo(), Notes{}) << "the reset has lost the join";
  EXPECT_EQ(handlers_[0].takeNotes(), Notes{"broken 1"});
  EXPECT_EQ(one_.messenger.traffic().underWay, 0u) << "a worker that leaves does not wait for it";
  wait();
  EXPECT_EQ(notesOfTwo(), join) << "and nothing else";
  reset(0);
  exchangeAll();
  wait();
  wait(); // each failure in a row makes the next attempt slower
  EXPECT_EQ(notesOfTwo(), join);
  one_.messenger.onAdmitted(one_.peer(1));
  exchangeAll();
  EXPECT_EQ(notesOfTwo(), Notes{"request 1"});
  reset(0);
  exchangeAll();
  EXPECT_EQ(handlers_[0].takeNotes().back().substr(0, 7), "failure") << "calls to it do not outlast a reset";
}

TEST(FailedMessageTest, PongsTakeThePlaceOfFramesThatNeverLeave) {
  LoopbackNetwork network;
  network.refuseDeviceMemory({ErrorCode::kDeviceFailed, "the device is broken"});
  Handlers handlers[2];
  TestWorker one(network, 0, membersOf(2), handlers[0].all);
  TestWorker two(network, 1, membersOf(2), handlers[1].all);
  one.peer(1).mayResume.store(true);
  const Bytes span(50'000);
  auto failing = makeOutgoing(4, span);
  failing->spans[0].from = c10::Device(c10::kCUDA, 0);
  one.messenger.post(one.peer(1), Kind::kRequest, 1, std::move(failing));
  one.messenger.post(one.peer(1), Kind::kRequest, 2, makeOutgoing(4));
  exchange(one, two);
  EXPECT_EQ(handlers[0].takeNotes(), Notes{"request not sent: the device is broken 1"});
  EXPECT_EQ(handlers[1].takeNotes(), Notes{"request 2"});
  two.advance(milliseconds(25));
  exchange(one, two);
  EXPECT_EQ(one.peer(1).resendBytes.load(), 0u);
  EXPECT_EQ(one.messenger.traffic().underWay, 0u);
}

// Messages of all sizes both ways. The connections lose, double and delay frames, and are reset.
class HardshipTest : public ResumptionTest, public testing::WithParamInterface<unsigned> {
 protected:
  void postSome(TestWorker& from, Rank to) {
    for (int count = static_cast<int>(random_() % 4); count != 0; --count) {
      const uint64_t call = next_++;
      const Kind kind = random_() % 2 == 0 ? Kind::kRequest : Kind::kResponse;
      const size_t body = random_() % 4 == 0 ? kLarge : random_() % 5000;
      const std::span<const std::byte> bytes = span_;
      from.messenger.post(
          from.peer(to),
          kind,
          call,
          makeOutgoing(body, random_() % 2 == 0 ? bytes.first(1 + random_() % bytes.size()) : bytes.first(0)));
      expected_[(kind == Kind::kRequest ? "request " : "answer ") + std::to_string(call)] = 1;
    }
  }
  void noteArrivals() {
    for (Handlers& handlers : handlers_) {
      for (const std::string& note : handlers.takeNotes()) {
        if (!note.starts_with("broken")) {
          ++arrived_[note];
        }
      }
      // The window has room again, so further messages may arrive at once.
      const std::vector<IncomingMessage> requests = std::exchange(handlers.requests, {});
      for (const IncomingMessage& request : requests) {
        for (const IncomingMessage::Span& span : request.spans) {
          ASSERT_TRUE(
              std::equal(span_.data(), span_.data() + span.bytes, static_cast<const std::byte*>(span.data.get())));
        }
      }
      (void)std::exchange(handlers.answers, {});
    }
  }

  std::mt19937 random_{GetParam()};
  Bytes span_ = [] {
    Bytes bytes(9'000'000); // three pieces
    for (size_t at = 0; at < bytes.size(); ++at) {
      bytes.data()[at] = static_cast<std::byte>(at * 7919 >> 8);
    }
    return bytes;
  }();
  uint64_t next_ = 1;
  std::map<std::string, int> expected_;
  std::map<std::string, int> arrived_;
};

TEST_P(HardshipTest, EachMessageArrivesOnce) {
  for (int round = 0; round < 30; ++round) {
    network_.setFault([this](const wire::Header&, SendMode) {
      switch (random_() % 10) {
        case 0:
          return Fate::kDrop;
        case 1:
          return Fate::kDuplicate;
        case 2:
          return Fate::kHold;
        default:
          return Fate::kDeliver;
      }
    });
    postSome(one_, 1);
    postSome(two_, 0);
    for (int step = static_cast<int>(random_() % 4); step != 0; --step) {
      (random_() % 2 == 0 ? one_ : two_).takeIn();
    }
    network_.setFault({}); // a real connection loses frames only by a reset
    if (random_() % 3 == 0) {
      network_.releaseHeld();
    }
    reset(0);
    reset(1);
    if (random_() % 2 == 0) {
      wait(milliseconds(random_() % 50));
    }
    noteArrivals();
  }
  network_.releaseHeld();
  for (int round = 0; round < 100; ++round) {
    wait();
    noteArrivals();
  }
  EXPECT_EQ(arrived_, expected_);
  EXPECT_EQ(one_.peer(1).resendBytes.load(), 0u);
  EXPECT_EQ(two_.peer(0).resendBytes.load(), 0u);
  EXPECT_EQ(one_.messenger.traffic().underWay + two_.messenger.traffic().underWay, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, HardshipTest, testing::Range(1u, 21u));

} // namespace
} // namespace torch_ucx_rpc
