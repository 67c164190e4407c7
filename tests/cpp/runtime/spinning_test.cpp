#include "runtime/spinning.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace torch_ucx_rpc {
namespace {

class SpinningTest : public testing::Test {
 protected:
  using Clock = Spinning::Clock;
  using Awaited = Spinning::Awaited;
  static constexpr auto kShort = std::chrono::microseconds(5); // between two checks of a spinning thread

  // Asks again after `later`.
  bool spin(Spinning::Wait& wait, Awaited awaited = Awaited::kMessage, Clock::duration later = kShort) {
    now_ += later;
    return wait.spin(awaited, now_);
  }
  // Makes `times` waits that each end after `time`.
  void waitFor(Clock::duration time, Spinning& spinning, Role role, int times) {
    for (int done = 0; done < times; ++done) {
      Spinning::Wait wait(spinning, role);
      (void)spin(wait);
      now_ += time;
      EXPECT_EQ(wait.end(now_), now_);
    }
  }
  void waitShortly(Spinning& spinning, Role role = Role::kLeader, int times = 20) {
    waitFor(kShort, spinning, role, times);
  }
  void waitLong(Spinning& spinning, Role role = Role::kLeader, int times = 5) {
    waitFor(2 * (Spinning::kLimit + Spinning::kWakeUp), spinning, role, times);
  }

  Clock::time_point now_{std::chrono::hours(1)};
};

TEST_F(SpinningTest, AutoModeSpinsAfterShortWaitsAndStopsAfterLongOnes) {
  Spinning spinning(Waiting::kAuto, 2);
  EXPECT_FALSE(spinning.isOn(Role::kLeader)) << "nothing is known yet";
  waitShortly(spinning);
  EXPECT_TRUE(spinning.isOn(Role::kLeader));
  waitLong(spinning);
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoModeEndsASpinAtItsLimit) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_TRUE(spin(wait));
  const Clock::time_point limit = now_ + Spinning::kLimit;
  while (now_ + kShort < limit) {
    ASSERT_TRUE(spin(wait)) << (limit - now_).count() << " ns before the limit";
  }
  EXPECT_FALSE(spin(wait));
}

TEST_F(SpinningTest, LeadersAndWaitingCallersAreCountedApart) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning, Role::kWaitingCaller);
  EXPECT_TRUE(spinning.isOn(Role::kWaitingCaller));
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, LeaderThatSleptWhileOthersDroveHadNoLongWait) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning);
  std::vector<Spinning::Wait> guards(10, Spinning::Wait(spinning, Role::kLeader));
  for (Spinning::Wait& guard : guards) {
    (void)spin(guard);
  }
  now_ += 2 * (Spinning::kLimit + Spinning::kWakeUp);
  waitShortly(spinning, Role::kWaitingCaller, 1);
  for (Spinning::Wait& guard : guards) {
    guard.end(now_);
  }
  EXPECT_TRUE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, SpinningStopsAfterSeveralInterruptionsNotAfterOne) {
  Spinning spinning(Waiting::kAuto, 2);
  waitShortly(spinning, Role::kLeader, 60);
  Spinning::Wait wait(spinning, Role::kLeader);
  const auto isSpunAfterAnInterruption = [&] {
    wait.again();
    (void)spin(wait);
    return spin(wait, Awaited::kMessage, 2 * Spinning::kInterruption);
  };
  EXPECT_TRUE(isSpunAfterAnInterruption());
  for (int interruption = 0; interruption < 5; ++interruption) {
    (void)isSpunAfterAnInterruption();
  }
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoModeNeverSpinsOnOneCore) {
  Spinning spinning(Waiting::kAuto, 1);
  waitShortly(spinning);
  EXPECT_FALSE(spinning.isOn(Role::kLeader));
}

TEST_F(SpinningTest, AutoModeSpinsOnlyIfEachProcessHasACore) {
  for (const size_t cores : {2, 16}) {
    for (const size_t processes : {size_t{2}, cores, cores + 1}) {
      Spinning spinning(Waiting::kAuto, cores);
      waitShortly(spinning);
      spinning.setProcessesHere(processes);
      EXPECT_EQ(spinning.isOn(Role::kLeader), processes <= cores) << processes << " processes, " << cores << " cores";
    }
  }
}

TEST_F(SpinningTest, PollModeSpinsFromTheBeginningBeyondTheLimit) {
  Spinning spinning(Waiting::kPoll, 1);
  spinning.setProcessesHere(8);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_TRUE(spin(wait));
  EXPECT_TRUE(spin(wait, Awaited::kMessage, 2 * Spinning::kLimit));
}

TEST_F(SpinningTest, SleepModeSpinsOnlyWhileDataIsOnItsWay) {
  Spinning spinning(Waiting::kSleep, 2);
  waitShortly(spinning);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_FALSE(spin(wait));
  wait.again();
  EXPECT_TRUE(spin(wait, Awaited::kTransfer));
  EXPECT_FALSE(spin(wait, Awaited::kTransfer, 2 * Spinning::kTransferLimit)) << "the other side makes no progress";
  wait.again();
  EXPECT_TRUE(spin(wait, Awaited::kTransfer)) << "something has moved";
}

TEST_F(SpinningTest, DevicesAreWaitedForLongerThanTransfersOfTheHost) {
  Spinning spinning(Waiting::kSleep, 2);
  Spinning::Wait wait(spinning, Role::kLeader);
  EXPECT_TRUE(spin(wait, Awaited::kDevice));
  EXPECT_TRUE(spin(wait, Awaited::kDevice, 2 * Spinning::kTransferLimit));
  EXPECT_FALSE(spin(wait, Awaited::kDevice, Spinning::kDeviceLimitToSleep));
  Spinning unlessSlow(Waiting::kAuto, 2);
  Spinning::Wait longer(unlessSlow, Role::kLeader);
  EXPECT_TRUE(spin(longer, Awaited::kDevice));
  EXPECT_TRUE(spin(longer, Awaited::kDevice, Spinning::kDeviceLimit / 2));
  EXPECT_FALSE(spin(longer, Awaited::kDevice, Spinning::kDeviceLimit));
  Spinning crowded(Waiting::kSleep, 2);
  crowded.setProcessesHere(3);
  Spinning::Wait other(crowded, Role::kLeader);
  EXPECT_FALSE(spin(other, Awaited::kDevice)) << "the other side may need this core";
}

TEST_F(SpinningTest, DriverWithShortAbsencesCountsAsBackSoon) {
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
