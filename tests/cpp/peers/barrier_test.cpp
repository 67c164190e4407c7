#include "barrier_job.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST(BarrierTest, OneWorkerAlonePassesAtOnce) {
  Job job(1);
  job.at(0).enter(42);
  EXPECT_EQ(job.result(0).sum, 42);
  EXPECT_FALSE(job.result(0).lost);
}

TEST(BarrierTest, NoWorkerPassesBeforeTheLastHasCome) {
  Job job(4);
  for (const Rank rank : {3, 0, 2}) {
    job.at(rank).enter(1);
    job.deliverAll();
  }
  for (const Rank rank : {0, 2, 3}) {
    EXPECT_FALSE(job.isReleased(rank));
  }
  EXPECT_EQ(job.at(0).missing(), std::vector<Rank>{1});
  EXPECT_TRUE(job.at(2).missing().empty()) << "only the coordinator knows";
  job.at(1).enter(1);
  job.deliverAll();
  for (Rank rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(job.result(rank).sum, 4);
  }
}

TEST(BarrierTest, SumsOverAllInAnyOrder) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Job job(5, seed);
    for (int round = 0; round < 4; ++round) {
      std::vector<Rank> order = {0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end(), job.random());
      for (const Rank rank : order) {
        job.at(rank).enter(rank * 10 - round);
        job.deliverOne();
      }
      job.deliverAll();
      for (Rank rank = 0; rank < 5; ++rank) {
        EXPECT_EQ(job.result(rank).sum, 100 - 5 * round) << "seed " << seed;
        EXPECT_FALSE(job.result(rank).lost);
      }
    }
  }
}

TEST(BarrierTest, WorkersMayBeOneRoundApart) {
  Job job(3);
  for (Rank rank = 0; rank < 3; ++rank) {
    job.at(rank).enter(1);
  }
  job.deliverAllTo(0);
  job.deliverAllTo(1); // 1 is released, and goes on to the next round before 2 is
  job.at(1).enter(5);
  job.deliverAllTo(0);
  job.deliverAllTo(2);
  EXPECT_EQ(job.result(2).sum, 3);
  job.at(2).enter(5);
  job.at(0).enter(5);
  job.deliverAll();
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job.result(rank).sum, 15);
  }
}

TEST(BarrierTest, WorkerThatSaidGoodbyeIsNotAwaited) {
  Job job(3);
  job.at(0).enter(1);
  job.at(2).enter(1);
  job.deliverAll();
  EXPECT_FALSE(job.isReleased(0));
  job.leave(1);
  job.deliverAll();
  EXPECT_EQ(job.result(0).sum, 2);
  EXPECT_EQ(job.result(2).sum, 2);
  EXPECT_FALSE(job.result(2).lost);
}

TEST(BarrierTest, CoordinatorThatLeavesIsReplaced) {
  Job job(4);
  for (const Rank rank : {1, 2, 3}) {
    job.at(rank).enter(10);
  }
  job.deliverAll(); // all have reported to rank 0, which leaves without entering
  job.leave(0);
  job.deliverAll();
  for (const Rank rank : {1, 2, 3}) {
    EXPECT_EQ(job.result(rank).sum, 30);
    EXPECT_FALSE(job.result(rank).lost);
  }
}

TEST(BarrierTest, NewCoordinatorAnswersForARoundReleasedInPart) {
  Job job(3);
  for (Rank rank = 0; rank < 3; ++rank) {
    job.at(rank).enter(7);
  }
  job.deliverAllTo(0);
  job.deliverAllTo(1);
  job.loseAllTo(2); // 2 does not get the release
  job.leave(0);
  job.deliverAll();
  EXPECT_EQ(job.result(1).sum, 21);
  EXPECT_EQ(job.result(2).sum, 21) << "the same sum as those released by the old one";
}

TEST(BarrierTest, DeathOfTheLastMissingWorkerReleasesTheOthersAndNamesIt) {
  for (const Rank dead : {2, 0}) { // rank 0 is the coordinator
    Job job(4);
    const auto each = [&](const auto& function) {
      for (Rank rank = 0; rank < 4; ++rank) {
        if (rank != dead) {
          function(rank);
        }
      }
    };
    each([&](Rank rank) { job.at(rank).enter(1); });
    job.deliverAll();
    job.die(dead);
    job.deliverAll();
    each([&](Rank rank) {
      EXPECT_EQ(job.result(rank).sum, 3);
      EXPECT_TRUE(job.names(rank, dead));
    });
  }
}

TEST(BarrierTest, DeathReleasesNoRoundThatALivingWorkerHasNotEntered) {
  Job job(4);
  job.at(0).enter(1);
  job.at(1).enter(1);
  job.deliverAll();
  job.die(1); // 1 has arrived
  job.die(3); // 3 has not
  job.deliverAll();
  EXPECT_FALSE(job.isReleased(0));
  job.at(2).enter(1);
  job.deliverAll();
  for (const Rank rank : {0, 2}) {
    EXPECT_EQ(job.result(rank).sum, 2) << "of the living";
    EXPECT_TRUE(job.names(rank, 1));
    EXPECT_TRUE(job.names(rank, 3));
  }
}

TEST(BarrierTest, LaterRoundsGoOnWithoutTheDeadAndNameThem) {
  Job job(3);
  job.die(0);
  for (int round = 0; round < 3; ++round) {
    job.at(1).enter(1);
    job.at(2).enter(1);
    job.deliverAll();
    for (const Rank rank : {1, 2}) {
      EXPECT_EQ(job.result(rank).sum, 2);
      EXPECT_TRUE(job.names(rank, 0));
    }
  }
}

TEST(BarrierTest, SumOfARoundOutlivesTheCoordinatorThatReleasedItInPart) {
  Job job(4);
  for (Rank rank = 0; rank < 4; ++rank) {
    job.at(rank).enter(7);
  }
  job.deliverAllTo(0);
  job.deliverAllTo(3); // only 3 has been released when 0 dies
  job.loseAllTo(1);
  job.loseAllTo(2);
  job.die(0);
  job.deliverAll();
  for (const Rank rank : {1, 2, 3}) {
    EXPECT_EQ(job.result(rank).sum, 28) << "the value of the dead worker counts, as in the result of 3";
    job.at(rank).enter(1);
  }
  job.deliverAll();
  for (const Rank rank : {1, 2, 3}) {
    EXPECT_EQ(job.result(rank).sum, 3);
  }
}

TEST(BarrierTest, WorkerThatAloneLostTheCoordinatorIsReleasedToo) {
  Job job(3);
  job.lose(2, 0);
  for (const Rank rank : {2, 1}) {
    job.at(rank).enter(1); // 2 reports to 1, which it takes for the coordinator
  }
  job.lose(0, 2);
  job.at(0).enter(1);
  job.deliverAll();
  EXPECT_TRUE(job.isReleased(1));
  EXPECT_TRUE(job.isReleased(2));
}

TEST(BarrierTest, LateReportOfAReleasedRoundIsAnswered) {
  Job job(2);
  job.at(0).enter(1);
  job.at(1).enter(2);
  job.deliverAllTo(0);
  job.loseAllTo(1);
  EXPECT_FALSE(job.isReleased(1));
  job.at(1).onMembershipChange(); // makes 1 report again
  job.deliverAll();
  EXPECT_EQ(job.result(1).sum, 3);
}

TEST(BarrierTest, ADoubledReportCountsOnce) {
  Job job(3);
  job.at(1).enter(5);
  job.at(1).onMembershipChange();
  job.at(1).onMembershipChange();
  job.at(0).enter(5);
  job.at(2).enter(5);
  job.deliverAll();
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job.result(rank).sum, 15);
  }
}

TEST(BarrierTest, WaitGivesUpAfterItsLimitAndCanBeRepeated) {
  Job job(2);
  job.at(0).enter(1);
  Barrier::Result result;
  EXPECT_FALSE(job.at(0).wait(std::chrono::milliseconds(5), result));
  job.at(1).enter(1);
  job.deliverAll();
  EXPECT_TRUE(job.at(0).wait(std::chrono::milliseconds(5), result));
  EXPECT_EQ(result.sum, 2);
}

// ---- The tree -------------------------------------------------------------------------------------------------------

TEST(BarrierTest, NoWorkerOfALargeJobTalksToMoreThanItsParentAndItsChildren) {
  constexpr Rank kSize = 1000;
  constexpr int kFanOut = 8;
  Job job(kSize, 1, kFanOut);
  for (Rank rank = kSize - 1; rank >= 0; --rank) {
    job.at(rank).enter(1);
  }
  job.deliverAll();
  for (Rank rank = 0; rank < kSize; ++rank) {
    EXPECT_EQ(job.result(rank).sum, kSize);
    EXPECT_LE(job.sent(rank), kFanOut + 1) << "an arrival and the releases";
    EXPECT_LE(job.contacts(rank), static_cast<size_t>(kFanOut + 1));
  }
}

TEST(BarrierTest, AWorkerReportsItsCollectedArrivalsAtATick) {
  Job job(15, 1, 2);
  for (Rank rank = 0; rank < 15; ++rank) {
    if (rank != 9) {
      job.at(rank).enter(1);
    }
  }
  job.deliverAll();
  for (const Rank rank : {4, 1}) {
    job.tick(rank);
    job.deliverAll();
  }
  EXPECT_EQ(job.at(0).missing(), std::vector<Rank>{9});
  EXPECT_EQ(job.at(4).missing(), std::vector<Rank>{9});
  EXPECT_EQ(job.at(4).toContact(), std::vector<Rank>{9});
  EXPECT_TRUE(job.at(2).missing().empty());
}

TEST(BarrierTest, WorkersBelowADeadOneArriveAtTheNextAboveIt) {
  Job job(15, 1, 2);
  for (const Rank rank : {7, 8, 9, 10}) {
    job.at(rank).enter(1); // they report to 3 and 4, which then die without entering
  }
  job.deliverAll();
  for (const Rank rank : {3, 4}) {
    job.die(rank);
  }
  for (const Rank rank : {0, 1, 2, 5, 6, 11, 12, 13, 14}) {
    job.at(rank).enter(1);
  }
  job.deliverAll();
  for (const Rank rank : {0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}) {
    EXPECT_EQ(job.result(rank).sum, 13);
    EXPECT_TRUE(job.names(rank, 3));
    EXPECT_TRUE(job.names(rank, 4));
  }
}

TEST(BarrierTest, ADeathThatOnlyTheParentNoticesIsNamed) {
  Job job(15, 1, 2);
  job.onlyContactsNoticeEnds();
  job.die(9); // before the shutdown; 0 has never talked to 9
  for (Rank rank = 0; rank < 15; ++rank) {
    if (rank != 9) {
      job.at(rank).enter(1);
    }
  }
  job.deliverAll();
  for (const Rank rank : {4, 0}) {
    EXPECT_FALSE(job.isReleased(rank));
    job.tick(rank); // it contacts missing workers, and those that others have lost
    job.deliverAll();
  }
  for (const Rank rank : {0, 4, 10, 14}) {
    EXPECT_EQ(job.result(rank).sum, 14);
    EXPECT_TRUE(job.names(rank, 9));
  }
}

TEST(BarrierTest, AReportThatAWorkerIsGoneEndsNoRound) {
  Job job(7, 1, 2);
  job.lose(1, 3);
  for (const Rank rank : {0, 1, 2, 4, 5, 6}) {
    job.at(rank).enter(1);
  }
  job.deliverAll();
  EXPECT_FALSE(job.isReleased(0)) << "only worker 1 cannot reach worker 3";
  EXPECT_EQ(job.at(0).toContact(), (std::vector<Rank>{1, 3})) << "worker 1, and worker 3 that it has lost";
  job.lose(3, 1); // 3 notices after a while
  job.at(3).enter(1);
  job.deliverAll();
  for (Rank rank = 0; rank < 7; ++rank) {
    EXPECT_EQ(job.result(rank).sum, 7);
  }
}

} // namespace
} // namespace torch_ucx_rpc
