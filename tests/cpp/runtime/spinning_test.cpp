#include "runtime/spinning.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

class SpinningTest : public testing::Test {
 protected:
  static void waitShortly(Spinning& spinning, Role role = Role::kLeader, int times = 20) {
    for (int time = 0; time < times; ++time) {
      Spinning::Wait wait(spinning, role);
      (void)wait.spin(false);
      wait.end();
    }
  }
  static void waitLong(Spinning& spinning, Role role = Role::kLeader, int times = 5) {
    for (int time = 0; time < times; ++time) {
      Spinning::Wait wait(spinning, role);
      (void)wait.spin(false);
      std::this_thread::sleep_for(2 * (Spinning::kLimit + Spinning::kWakeUp));
      wait.end();
    }
  }
};

TEST_F(SpinningTest, AutoSpinsOnceWaitsHaveBeenShortAndStopsWhenTheyAreLong) {
  Spinning spinning(Waiting::kAuto, 2);
  EXPECT_FALSE(spinning.isOn(Role::kLeader)) << "nothing is known yet";
  waitShortly(spinning);
  EXPECT_TRUE(spinning.isOn(Role::kLeader));
  waitLong(spinning);
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoEndsASpinAtItsLimit) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning);
  Spinning::Wait wait(spinning, Role::kLeader);
  const auto began = Spinning::Clock::now();
  while (wait.spin(false)) {
    ASSERT_LT(Spinning::Clock::now() - began, std::chrono::seconds(5));
  }
}

TEST_F(SpinningTest, LeadersAndWaitingCallersLearnApart) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning, Role::kWaitingCaller);
  EXPECT_TRUE(spinning.isOn(Role::kWaitingCaller));
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, WhoSleptWhileOthersWereServedHasNotWaitedForLong) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning);
  std::vector<Spinning::Wait> guards(10, Spinning::Wait(spinning, Role::kLeader));
  for (Spinning::Wait& guard : guards) {
    (void)guard.spin(false);
  }
  std::this_thread::sleep_for(2 * (Spinning::kLimit + Spinning::kWakeUp));
  waitShortly(spinning, Role::kWaitingCaller, 1);
  for (Spinning::Wait& guard : guards) {
    guard.end();
  }
  EXPECT_TRUE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, OneInterruptionIsNoReasonToStopAndSeveralAre) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning, Role::kLeader, 60);
  Spinning::Wait wait(spinning, Role::kLeader);
  const auto isSpunAfterAnInterruption = [&wait] {
    wait.again();
    (void)wait.spin(false);
    std::this_thread::sleep_for(2 * Spinning::kInterruption);
    return wait.spin(false);
  };
  EXPECT_TRUE(isSpunAfterAnInterruption());
  for (int interruption = 0; interruption < 5; ++interruption) {
    (void)isSpunAfterAnInterruption();
  }
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoNeverSpinsOnOneCore) {
  Spinning spinning(Waiting::kAuto, 1);
  waitShortly(spinning);
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoSpinsOnlyWhereEachProcessHasACore) {
  for (const size_t cores : {2, 16}) {
    for (const size_t processes : {size_t{2}, cores, cores + 1}) {
      Spinning spinning(Waiting::kAuto, cores);
      waitShortly(spinning);
      spinning.setProcessesHere(processes);
      EXPECT_EQ(spinning.isOn(Role::kLeader), processes <= cores) << processes << " processes, " << cores << " cores";
    }
  }
}

TEST_F(SpinningTest, PollSpinsFromTheBeginningAndForLong) {
  Spinning spinning(Waiting::kPoll, 1);
  spinning.setProcessesHere(8);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_TRUE(wait.spin(false));
  std::this_thread::sleep_for(2 * Spinning::kLimit);
  EXPECT_TRUE(wait.spin(false));
}

TEST_F(SpinningTest, SleepLooksAgainOnlyWhileDataIsOnItsWay) {
  Spinning spinning(Waiting::kSleep, 2);
  waitShortly(spinning);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_FALSE(wait.spin(false));
  wait.again();
  EXPECT_TRUE(wait.spin(true));
  std::this_thread::sleep_for(2 * Spinning::kTransferLimit);
  EXPECT_FALSE(wait.spin(true)) << "the other side is not at it";
  wait.again();
  EXPECT_TRUE(wait.spin(true)) << "something has moved";
}

TEST_F(SpinningTest, BackSoonIsWhoWasAwayShortly) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning);
  EXPECT_FALSE(spinning.isBackSoon(Role::kLeader));
  for (int time = 0; time < 20; ++time) {
    spinning.wasAway(Role::kLeader, Spinning::kShortAbsence / 2);
  }
  EXPECT_TRUE(spinning.isBackSoon(Role::kLeader));
  EXPECT_FALSE(spinning.isBackSoon(Role::kWaitingCaller));
  for (int time = 0; time < 5; ++time) {
    spinning.wasAway(Role::kLeader, Spinning::kShortAbsence * 2);
  }
  EXPECT_FALSE(spinning.isBackSoon(Role::kLeader));
}

} // namespace
} // namespace torch_ucx_rpc
