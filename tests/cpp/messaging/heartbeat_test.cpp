#include "messaging/heartbeat.h"

#include "assume_worker_lock.h"

#include <gtest/gtest.h>

#include <string>

namespace torch_ucx_rpc {
namespace {

using std::chrono::milliseconds;

class HeartbeatTest : public testing::Test {
 protected:
  static constexpr auto kLimit = milliseconds(1000);

  Peer& add(Rank rank) {
    Member member;
    member.rank = rank;
    member.name = "w" + std::to_string(rank);
    member.session = 100 + static_cast<uint64_t>(rank);
    directory_.add(member);
    Peer& peer = directory_.at(rank);
    peer.needsHeartbeat.store(true);
    connections_.of(peer).setEndpoint(0);
    return peer;
  }

  // Lets time pass, and checks in each period of the heartbeat. Returns all findings.
  Heartbeat::Findings wait(milliseconds time) {
    return wait(heartbeat_, time);
  }
  Heartbeat::Findings wait(Heartbeat& heartbeat, milliseconds time) {
    Heartbeat::Findings all;
    for (const auto end = now_ + time; now_ < end;) {
      now_ += heartbeat.period();
      const Heartbeat::Findings found = heartbeat.check(now_);
      all.quiet.insert(all.quiet.end(), found.quiet.begin(), found.quiet.end());
      all.lost.insert(all.lost.end(), found.lost.begin(), found.lost.end());
      all.suspect.insert(all.suspect.end(), found.suspect.begin(), found.suspect.end());
      all.back.insert(all.back.end(), found.back.begin(), found.back.end());
    }
    return all;
  }

  const AssumeWorkerLock lock_;
  Directory directory_;
  Connections connections_;
  Heartbeat heartbeat_{directory_, kLimit};
  Heartbeat::Clock::time_point now_{std::chrono::hours(1)};
};

TEST_F(HeartbeatTest, AQuietPeerIsAskedOnceForASignOfLife) {
  Peer& peer = add(1);
  EXPECT_EQ(wait(kLimit / 2).quiet, std::vector<Peer*>{&peer});
  connections_.of(peer).silence.heardSinceCheck = true;
  EXPECT_EQ(wait(kLimit / 2).quiet, std::vector<Peer*>{&peer}) << "and again when it falls silent again";
}

TEST_F(HeartbeatTest, PeerThatIsHeardIsNeitherAskedNorLost) {
  Peer& peer = add(1);
  for (int period = 0; period < 100; ++period) {
    connections_.of(peer).silence.heardSinceCheck = true;
    const Heartbeat::Findings found = wait(heartbeat_.period());
    EXPECT_TRUE(found.quiet.empty() && found.lost.empty());
  }
}

TEST_F(HeartbeatTest, ASilentPeerIsLostAfterTheLimitAndNotBefore) {
  Peer& peer = add(1);
  EXPECT_TRUE(wait(kLimit).lost.empty());
  EXPECT_EQ(wait(kLimit / 2).lost.at(0), &peer);
  const std::string what = heartbeat_.describe(peer).message();
  EXPECT_NE(what.find("no sign of life for 1."), std::string::npos) << what;
  EXPECT_NE(what.find("heartbeat_limit is 1.0 s"), std::string::npos) << what;
}

TEST_F(HeartbeatTest, WithAReconnectLimitASilentPeerIsSuspectFirstAndLostAfterBoth) {
  Heartbeat patient(directory_, kLimit, 3 * kLimit);
  Peer& peer = add(1);
  wait(patient, kLimit);
  Heartbeat::Findings found = wait(patient, kLimit / 2);
  EXPECT_EQ(found.suspect, std::vector<Peer*>{&peer});
  EXPECT_TRUE(found.lost.empty());
  EXPECT_TRUE(peer.isResuming.load());
  EXPECT_NE(patient.describeSuspect(peer).find("3.0 s more (reconnect_limit)"), std::string::npos);
  found = wait(patient, 2 * kLimit);
  EXPECT_TRUE(found.suspect.empty() && found.lost.empty()) << "it is said once";
  EXPECT_EQ(wait(patient, kLimit).lost.at(0), &peer);
}

TEST_F(HeartbeatTest, ASuspectThatIsHeardAgainIsNotLost) {
  Heartbeat patient(directory_, kLimit, 3 * kLimit);
  Peer& peer = add(1);
  wait(patient, 2 * kLimit);
  connections_.of(peer).silence.heardSinceCheck = true;
  const Heartbeat::Findings found = wait(patient, patient.period());
  ASSERT_EQ(found.back.size(), 1u);
  EXPECT_EQ(found.back[0].first, &peer);
  EXPECT_GE(found.back[0].second, kLimit);
  EXPECT_FALSE(peer.isResuming.load());
  EXPECT_EQ(peer.timesResumed.load(), 1u);
  EXPECT_TRUE(wait(patient, 3 * kLimit).lost.empty()) << "both limits begin again";
}

TEST_F(HeartbeatTest, ASuspectWhoseProcessHasEndedIsLostWithinASecond) {
  Heartbeat patient(directory_, kLimit, 60 * kLimit);
  Peer& peer = add(1);
  wait(patient, 2 * kLimit);
  patient.doubt(peer, now_);
  EXPECT_EQ(wait(patient, milliseconds(1'100)).lost.at(0), &peer);
}

TEST_F(HeartbeatTest, ALateSignOfLifeRestartsTheSilence) {
  Peer& peer = add(1);
  EXPECT_TRUE(wait(kLimit).lost.empty());
  connections_.of(peer).silence.heardSinceCheck = true;
  EXPECT_TRUE(wait(kLimit).lost.empty());
}

TEST_F(HeartbeatTest, PeerWhoseProcessProbablyEndedIsLostInASecondUnlessHeard) {
  Heartbeat slow(directory_, milliseconds(60'000)); // checks every 3 s
  Peer& ended = add(1);
  Peer& alive = add(2);
  wait(slow, milliseconds(30'000));
  slow.doubt(ended, now_);
  slow.doubt(alive, now_);
  connections_.of(alive).silence.heardSinceCheck = true;
  EXPECT_EQ(wait(slow, slow.period()).lost, std::vector<Peer*>{&ended});
  const std::string what = slow.describe(ended).message();
  EXPECT_NE(what.find("its process has ended"), std::string::npos) << what;
  EXPECT_FALSE(connections_.of(alive).silence.isDoubted);
}

TEST_F(HeartbeatTest, TheTimeBeforeADoubtDoesNotCount) {
  Peer& peer = add(1);
  Heartbeat slow(directory_, milliseconds(10'000)); // checks every 500 ms
  wait(slow, milliseconds(5'000));
  slow.doubt(peer, now_ + milliseconds(400));
  EXPECT_TRUE(wait(slow, milliseconds(1'000)).lost.empty()) << "600 ms since the doubt";
  EXPECT_EQ(wait(slow, milliseconds(500)).lost, std::vector<Peer*>{&peer});
}

TEST_F(HeartbeatTest, APeerThatHasBeenHeardIsWatchedEvenWithoutAnEndpoint) {
  Peer& peer = add(1);
  connections_.of(peer).silence.heardSinceCheck = true;
  wait(heartbeat_.period());
  connections_.of(peer).setEndpoint(std::nullopt); // as after a failure in this process
  const Heartbeat::Findings found = wait(2 * kLimit);
  EXPECT_EQ(found.quiet, std::vector<Peer*>{&peer}) << "which makes another endpoint";
  EXPECT_EQ(found.lost.at(0), &peer);
}

// The peer has called this worker, which has not answered yet. So this worker has no connection to the peer that a
// lifeline could watch.
TEST_F(HeartbeatTest, APeerWithoutAnEndpointIsNotMetYet) {
  Peer& peer = add(1);
  connections_.of(peer).setEndpoint(std::nullopt);
  peer.isMet.store(true);
  connections_.of(peer).silence.heardSinceCheck = true;
  EXPECT_TRUE(heartbeat_.check(now_).met.empty());
  connections_.of(peer).setEndpoint(0);
  EXPECT_EQ(heartbeat_.check(now_).met, std::vector<Peer*>{&peer});
}

TEST_F(HeartbeatTest, APeerIsMetOnceWhenItIsHeardForTheFirstTime) {
  Peer& peer = add(1);
  add(2).needsHeartbeat.store(false);
  EXPECT_TRUE(heartbeat_.check(now_).met.empty());
  connections_.of(directory_.at(1)).silence.heardSinceCheck = true;
  connections_.of(directory_.at(2)).silence.heardSinceCheck = true;
  EXPECT_EQ(heartbeat_.check(now_).met, std::vector<Peer*>{&peer}) << "the process of the other one is watched";
  connections_.of(peer).silence.heardSinceCheck = true;
  EXPECT_TRUE(heartbeat_.check(now_).met.empty());
}

TEST_F(HeartbeatTest, TimeInWhichThisProcessDidNotRunDoesNotCount) {
  add(1);
  EXPECT_TRUE(wait(kLimit / 2).lost.empty());
  now_ += 100 * kLimit; // as if this process had been stopped
  EXPECT_TRUE(wait(kLimit / 4).lost.empty());
}

TEST_F(HeartbeatTest, OnlyPresentConnectedPeersThatNeedAHeartbeatCount) {
  add(1).needsHeartbeat.store(false);
  connections_.of(add(2)).setEndpoint(std::nullopt);
  ASSERT_TRUE(add(3).moveTo(Peer::State::kLeft, {ErrorCode::kShutDown, "it has left"}));
  const Heartbeat::Findings found = wait(10 * kLimit);
  EXPECT_TRUE(found.quiet.empty() && found.lost.empty());
}

} // namespace
} // namespace torch_ucx_rpc
