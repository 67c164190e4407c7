#include "peers/barrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

// Several workers' barriers in one thread. Their frames, and the news of each other's ends, wait until deliver() is
// called: in order between two workers, in any order otherwise, as on a network.
class Job {
 private:
  // One worker's view of the others, and its link to them.
  class Link final : public Barrier::Link {
   public:
    Link(Job& job, Rank rank) : job_(job), rank_(rank) {}
    bool isPresent(Rank rank) const override {
      return rank < job_.size_ && !gone_.contains(rank);
    }
    Rank endOfRanks() const override {
      return job_.size_;
    }
    Error lost() const override {
      std::string sentence;
      for (const auto& [rank, hasFailed] : gone_) {
        sentence += hasFailed ? "worker 'w" + std::to_string(rank) + "' has died; " : "";
      }
      return sentence.empty() ? Error() : Error(ErrorCode::kPeerFailed, sentence);
    }
    void sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) override {
      EXPECT_LT(to, rank_) << "a parent is below";
      job_.contact(rank_, to);
      ++job_.sent_[rank_];
      job_.post(
          rank_, to, [&job = job_, from = rank_, to, round, arrivals] { job.at(to).onArrive(from, round, arrivals); });
    }
    void sendRelease(Rank to, uint64_t round, const Barrier::Result& result) override {
      job_.contact(rank_, to);
      ++job_.sent_[rank_];
      job_.post(
          rank_, to, [&job = job_, from = rank_, to, round, result] { job.at(to).onRelease(from, round, result); });
    }

    std::map<Rank, bool> gone_; // whether it has failed

   private:
    Job& job_;
    const Rank rank_;
  };

 public:
  explicit Job(Rank size, unsigned seed = 1, int fanOut = Barrier::kFanOut) : size_(size), random_(seed) {
    for (Rank rank = 0; rank < size; ++rank) {
      nodes_.push_back(std::make_unique<Node>(*this, rank, fanOut));
    }
  }

  Barrier& at(Rank rank) {
    return nodes_[static_cast<size_t>(rank)]->barrier;
  }

  // `rank` says goodbye, or dies. All others notice, or only its contacts, each in its own time.
  void leave(Rank rank) {
    end(rank, false);
  }
  void die(Rank rank) {
    for (auto& [channel, frames] : channels_) {
      if (channel.first == rank) {
        frames.clear(); // frames that have not left are lost
      }
    }
    end(rank, true);
  }
  void onlyContactsNoticeEnds() {
    doOnlyContactsNotice_ = true;
  }

  // `rank` alone loses `other`.
  void lose(Rank rank, Rank other) {
    notice(rank, other, true);
  }

  // Runs the periodic check of a waiting worker.
  void tick(Rank rank) {
    at(rank).tick();
    for (const Rank other : at(rank).toContact()) {
      contact(rank, other);
    }
  }

  void deliverOne() {
    std::vector<Channel> ready;
    for (const auto& [channel, frames] : channels_) {
      if (!frames.empty()) {
        ready.push_back(channel);
      }
    }
    if (!ready.empty()) {
      deliverNextOf(ready[random_() % ready.size()]);
    }
  }
  void deliverAll() {
    while (undelivered() != 0) {
      deliverOne();
    }
  }
  void deliverAllTo(Rank rank) {
    for (bool isAnyLeft = true; isAnyLeft;) {
      isAnyLeft = false;
      for (auto& [channel, frames] : channels_) {
        if (channel.second == rank && !frames.empty()) {
          deliverNextOf(channel);
          isAnyLeft = true;
          break;
        }
      }
    }
  }
  void loseAllTo(Rank rank) {
    for (auto& [channel, frames] : channels_) {
      if (channel.second == rank) {
        frames.clear();
      }
    }
  }

  bool isReleased(Rank rank) {
    Barrier::Result result;
    return at(rank).wait(std::chrono::milliseconds(0), result);
  }
  Barrier::Result result(Rank rank) {
    Barrier::Result result;
    EXPECT_TRUE(at(rank).wait(std::chrono::milliseconds(0), result)) << "rank " << rank << " was not released";
    return result;
  }
  // Whether the result at `rank` names `dead` as dead.
  bool names(Rank rank, Rank dead) {
    return result(rank).lost.message().find("worker 'w" + std::to_string(dead) + "'") != std::string::npos;
  }
  // The numbers of frames that `rank` has sent, and of its contacts.
  int sent(Rank rank) {
    return sent_[rank];
  }
  size_t contacts(Rank rank) {
    return met_[rank].size();
  }
  std::mt19937& random() {
    return random_;
  }

 private:
  using Channel = std::pair<Rank, Rank>; // from, to
  struct Node {
    Node(Job& job, Rank rank, int fanOut) : link(job, rank), barrier(rank, link, fanOut) {}
    Link link;
    Barrier barrier;
  };

  void post(Rank from, Rank to, std::function<void()> frame) {
    channels_[{from, to}].push_back(std::move(frame));
  }
  void postEnd(Rank gone, Rank to) {
    post(gone, to, [this, gone, to] { notice(to, gone, gone_.at(gone)); });
  }
  void notice(Rank rank, Rank gone, bool hasFailed) {
    Node& node = *nodes_[static_cast<size_t>(rank)];
    if (node.link.gone_.emplace(gone, hasFailed).second) {
      node.barrier.onMembershipChange();
    }
  }
  void end(Rank rank, bool hasFailed) {
    gone_[rank] = hasFailed;
    for (Rank to = 0; to < size_; ++to) {
      if (to != rank && (!doOnlyContactsNotice_ || met_[rank].contains(to))) {
        postEnd(rank, to);
      }
    }
  }
  // A worker notices only the ends of its contacts.
  void contact(Rank one, Rank other) {
    met_[one].insert(other);
    met_[other].insert(one);
    if (gone_.contains(other)) {
      postEnd(other, one);
    }
  }
  size_t undelivered() const {
    size_t count = 0;
    for (const auto& [channel, frames] : channels_) {
      count += frames.size();
    }
    return count;
  }
  void deliverNextOf(const Channel& channel) {
    std::deque<std::function<void()>>& frames = channels_[channel];
    const std::function<void()> frame = std::move(frames.front());
    frames.pop_front();
    if (!gone_.contains(channel.second)) {
      frame();
    }
  }

  const Rank size_;
  std::map<Channel, std::deque<std::function<void()>>> channels_;
  std::map<Rank, bool> gone_; // whether it has failed
  std::map<Rank, std::set<Rank>> met_;
  std::map<Rank, int> sent_;
  bool doOnlyContactsNotice_ = false;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

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
  job.deliverAllTo(1); // released, and on to the next round, before 2 hears of it
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
  job.deliverAll(); // all have reported to rank 0, which now goes without entering
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
  job.loseAllTo(2); // the release to 2 is lost with its sender
  job.leave(0);
  job.deliverAll();
  EXPECT_EQ(job.result(1).sum, 21);
  EXPECT_EQ(job.result(2).sum, 21) << "the same sum as those released by the old one";
}

TEST(BarrierTest, DeathOfTheLastMissingWorkerReleasesTheOthersAndNamesIt) {
  Job job(4);
  for (const Rank rank : {0, 1, 3}) {
    job.at(rank).enter(1);
  }
  job.deliverAll();
  job.die(2);
  job.deliverAll();
  for (const Rank rank : {0, 1, 3}) {
    EXPECT_EQ(job.result(rank).sum, 3);
    EXPECT_TRUE(job.names(rank, 2));
  }
}

TEST(BarrierTest, DeathOfTheCoordinatorReleasesTheOthersAndNamesIt) {
  Job job(4);
  for (const Rank rank : {1, 2, 3}) {
    job.at(rank).enter(1);
  }
  job.deliverAll();
  job.die(0);
  job.deliverAll();
  for (const Rank rank : {1, 2, 3}) {
    EXPECT_EQ(job.result(rank).sum, 3);
    EXPECT_TRUE(job.names(rank, 0));
  }
}

TEST(BarrierTest, DeathReleasesNoRoundThatALivingWorkerHasNotEntered) {
  Job job(4);
  job.at(0).enter(1);
  job.at(1).enter(1);
  job.deliverAll();
  job.die(1); // after it has arrived
  job.die(3); // before
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
    EXPECT_EQ(job.result(rank).sum, 28) << "with the value of the dead, as 3 has it";
    job.at(rank).enter(1);
  }
  job.deliverAll();
  for (const Rank rank : {1, 2, 3}) {
    EXPECT_EQ(job.result(rank).sum, 3);
  }
}

TEST(BarrierTest, WorkerThatAloneHasLostTheCoordinatorIsReleasedWithTheOthers) {
  Job job(3);
  job.lose(2, 0);
  for (const Rank rank : {2, 1}) {
    job.at(rank).enter(1); // 2 arrives at 1, which it takes for the coordinator
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
  job.at(1).onMembershipChange(); // makes it report again
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

TEST(BarrierTest, NoWorkerOfALargeJobTalksToMoreThanItsParentAndThoseBelow) {
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
    job.at(rank).enter(1); // at 3 and 4, which then die before they have come
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
  job.die(9); // before the shutdown; 0 has never talked to it
  for (Rank rank = 0; rank < 15; ++rank) {
    if (rank != 9) {
      job.at(rank).enter(1);
    }
  }
  job.deliverAll();
  for (const Rank rank : {4, 0}) {
    EXPECT_FALSE(job.isReleased(rank));
    job.tick(rank); // contacts the missing workers, and workers that others have lost
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
  EXPECT_FALSE(job.isReleased(0)) << "rank 3 is out of reach of 1 alone";
  EXPECT_EQ(job.at(0).toContact(), (std::vector<Rank>{1, 3})) << "the one that has lost it, and itself";
  job.lose(3, 1); // as it does after a while
  job.at(3).enter(1);
  job.deliverAll();
  for (Rank rank = 0; rank < 7; ++rank) {
    EXPECT_EQ(job.result(rank).sum, 7);
  }
}

// ---- Any schedule ---------------------------------------------------------------------------------------------------

struct Shape {
  Rank workers;
  int fanOut;
  bool doOnlyContactsNotice = false; // that a worker has ended
};

class BarrierScheduleTest : public testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    BarrierScheduleTest,
    testing::Values(
        Shape{5, Barrier::kFanOut},
        Shape{11, 2},
        Shape{14, 3},
        Shape{5, Barrier::kFanOut, true},
        Shape{11, 2, true},
        Shape{9, 1, true}),
    [](const auto& shape) {
      return std::to_string(shape.param.workers) + "WorkersFanOut" + std::to_string(shape.param.fanOut) +
          (shape.param.doOnlyContactsNotice ? "ContactsNotice" : "AllNotice");
    });

// Workers leave or die before, in and after a round, and the others learn of it at different times. All living workers
// are released from each round, with the same sum, and no living worker is called dead.
TEST_P(BarrierScheduleTest, LivingWorkersAreReleasedWithOneSum) {
  const Shape shape = GetParam();
  for (unsigned seed = 0; seed < 2000; ++seed) {
    constexpr int kRounds = 4;
    Job job(shape.workers, seed, shape.fanOut);
    if (shape.doOnlyContactsNotice) {
      job.onlyContactsNoticeEnds();
    }
    std::mt19937& random = job.random();
    std::vector<Rank> living(static_cast<size_t>(shape.workers));
    std::iota(living.begin(), living.end(), Rank{0});
    std::map<Rank, std::vector<int64_t>> sums;
    std::map<Rank, int> entered;
    bool hasAnyDied = false;
    const auto look = [&](Rank rank) {
      const bool isReleased = entered[rank] != 0 && job.isReleased(rank);
      if (isReleased && sums[rank].size() < static_cast<size_t>(entered[rank])) {
        sums[rank].push_back(job.result(rank).sum);
        EXPECT_TRUE(hasAnyDied || !job.result(rank).lost) << "seed " << seed << ": a goodbye is no error";
      }
      if (entered[rank] < kRounds && (entered[rank] == 0 || isReleased)) {
        ++entered[rank];
        job.at(rank).enter(static_cast<int64_t>(random() % 3));
      } else if (!isReleased) {
        job.tick(rank);
      }
    };
    const bool doDie = seed % 3 != 0; // else each worker that ends says goodbye
    for (int step = 0; step < 30 * shape.workers; ++step) {
      const Rank rank = living[random() % living.size()];
      if (living.size() > 1 && random() % static_cast<unsigned>(8 * shape.workers) == 0) {
        std::erase(living, rank);
        hasAnyDied = hasAnyDied || doDie;
        doDie ? job.die(rank) : job.leave(rank);
      } else if (random() % 3 == 0) {
        look(rank);
      }
      job.deliverOne();
    }
    // Each end is noticed after a few exchanges at most.
    for (int turn = 0; turn < kRounds * 3 * shape.workers; ++turn) {
      job.deliverAll();
      std::ranges::for_each(living, look);
    }
    for (const Rank rank : living) {
      ASSERT_EQ(sums[rank].size(), static_cast<size_t>(kRounds)) << "seed " << seed << ", rank " << rank;
      EXPECT_EQ(sums[rank], sums[living.front()]) << "seed " << seed << ", rank " << rank;
      for (const Rank alive : living) {
        EXPECT_FALSE(job.names(rank, alive)) << "seed " << seed;
      }
    }
  }
}

} // namespace
} // namespace torch_ucx_rpc
