#include "peers/barrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

Member member(Rank rank) {
  Member made;
  made.rank = rank;
  made.name = "w" + std::to_string(rank);
  made.host = "host";
  made.session = 100 + static_cast<uint64_t>(rank);
  return made;
}

// Several workers' barriers in one thread. What they send, and what they learn of one another, waits until it is
// delivered: in order from one worker to another, in any order otherwise, as on a network.
class Job {
 private:
  // From one worker to the others.
  class Link final : public Barrier::Link {
   public:
    Link(Job& job, Rank rank) : job_(job), rank_(rank) {}
    void sendArrive(Peer& coordinator, uint64_t round, int64_t value) override {
      const Rank to = coordinator.member().rank;
      job_.post(rank_, to, [&job = job_, from = rank_, to, round, value] {
        Node& target = *job.nodes_[static_cast<size_t>(to)];
        target.barrier->onArrive(*target.directory.find(from), round, value);
      });
    }
    void sendRelease(Peer& peer, uint64_t round, const Barrier::Result& result) override {
      const Rank to = peer.member().rank;
      job_.post(rank_, to, [&job = job_, to, round, result] { job.at(to).onRelease(round, result); });
    }

   private:
    Job& job_;
    const Rank rank_;
  };

 public:
  explicit Job(Rank size, unsigned seed = 1) : random_(seed) {
    for (Rank rank = 0; rank < size; ++rank) {
      nodes_.push_back(std::make_unique<Node>());
      Node& node = *nodes_.back();
      for (Rank other = 0; other < size; ++other) {
        node.directory.add(member(other));
      }
      node.link = std::make_unique<Link>(*this, rank);
      node.barrier = std::make_unique<Barrier>(node.directory, rank, *node.link);
    }
  }

  Barrier& at(Rank rank) {
    return *nodes_[static_cast<size_t>(rank)]->barrier;
  }

  // `rank` says goodbye to everybody, or its death is noticed by everybody, each in its time.
  void leave(Rank rank) {
    isGone_[rank] = true;
    tellOthers(rank, Peer::State::kLeft, ErrorCode::kShutDown, " has left");
  }
  void die(Rank rank) {
    isGone_[rank] = true;
    for (auto& [channel, frames] : channels_) {
      if (channel.first == rank) {
        frames.clear(); // what had not gone out never does
      }
    }
    tellOthers(rank, Peer::State::kFailed, ErrorCode::kPeerFailed, " has died");
  }

  // `rank` alone loses `other`.
  void lose(Rank rank, Rank other) {
    Node& node = *nodes_[static_cast<size_t>(rank)];
    Peer& peer = *node.directory.find(other);
    peer.moveTo(Peer::State::kFailed, {ErrorCode::kPeerFailed, peer.describe() + " is out of reach"});
    node.barrier->onMembershipChange();
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
  // Whether what `rank` was released with says that `dead` has died.
  bool names(Rank rank, Rank dead) {
    return result(rank).lost.message().find("worker 'w" + std::to_string(dead) + "'") != std::string::npos;
  }
  std::mt19937& random() {
    return random_;
  }

 private:
  using Channel = std::pair<Rank, Rank>; // from, to
  struct Node {
    std::unique_ptr<Link> link;
    Directory directory;
    std::unique_ptr<Barrier> barrier;
  };

  void post(Rank from, Rank to, std::function<void()> frame) {
    channels_[{from, to}].push_back(std::move(frame));
  }
  void tellOthers(Rank rank, Peer::State state, ErrorCode code, const std::string& what) {
    for (size_t index = 0; index < nodes_.size(); ++index) {
      const auto to = static_cast<Rank>(index);
      if (to != rank) {
        post(rank, to, [this, rank, index, state, code, what] {
          Peer* const peer = nodes_[index]->directory.find(rank);
          peer->moveTo(state, {code, peer->describe() + what});
          nodes_[index]->barrier->onMembershipChange();
        });
      }
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
    if (!isGone_[channel.second]) {
      frame();
    }
  }

  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<Channel, std::deque<std::function<void()>>> channels_;
  std::map<Rank, bool> isGone_;
  std::mt19937 random_;
};

TEST(BarrierTest, OneWorkerAlonePassesAtOnce) {
  Job job(1);
  job.at(0).enter(42);
  EXPECT_EQ(job.result(0).sum, 42);
  EXPECT_FALSE(job.result(0).lost);
}

TEST(BarrierTest, NobodyPassesBeforeTheLastHasCome) {
  Job job(4);
  for (const Rank rank : {3, 0, 2}) {
    job.at(rank).enter(1);
    job.deliverAll();
  }
  for (const Rank rank : {0, 2, 3}) {
    EXPECT_FALSE(job.isReleased(rank));
  }
  ASSERT_EQ(job.at(0).missing().size(), 1u);
  EXPECT_EQ(job.at(0).missing()[0]->member().rank, 1);
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

TEST(BarrierTest, WhoSaidGoodbyeIsNotWaitedFor) {
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

// Workers leave at any moment, before, in and after the round, and every other worker learns of it at another time.
// Those that stay are all released, and without an error.
TEST(BarrierTest, EverybodyWhoStaysIsReleasedWhoeverLeaves) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    constexpr Rank kSize = 5;
    Job job(kSize, seed);
    std::mt19937& random = job.random();
    std::vector<bool> isGone(kSize, false);
    for (int round = 0; round < 3; ++round) {
      std::vector<Rank> order;
      for (Rank rank = 0; rank < kSize; ++rank) {
        order.push_back(rank);
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const Rank rank : order) {
        const auto index = static_cast<size_t>(rank);
        if (isGone[index]) {
          continue;
        }
        const bool isLeaving = random() % 6 == 0 && std::count(isGone.begin(), isGone.end(), false) > 1;
        if (isLeaving) {
          isGone[index] = true;
          job.leave(rank);
        } else {
          job.at(rank).enter(1);
        }
        for (auto frames = random() % 6; frames > 0; --frames) {
          job.deliverOne();
        }
      }
      job.deliverAll();
      for (Rank rank = 0; rank < kSize; ++rank) {
        if (!isGone[static_cast<size_t>(rank)]) {
          ASSERT_TRUE(job.isReleased(rank)) << "seed " << seed << ", round " << round << ", rank " << rank;
          EXPECT_FALSE(job.result(rank).lost) << "seed " << seed;
        }
      }
    }
  }
}

// The same with deaths, in several rounds. All that live are released from each round, with the same sum.
TEST(BarrierTest, LivingWorkersAreReleasedWithOneSum) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    constexpr Rank kSize = 5;
    constexpr int kRounds = 4;
    Job job(kSize, seed);
    std::mt19937& random = job.random();
    std::vector<Rank> living = {0, 1, 2, 3, 4};
    std::map<Rank, std::vector<int64_t>> sums;
    std::map<Rank, int> entered;
    const auto look = [&](Rank rank) {
      const bool isReleased = entered[rank] != 0 && job.isReleased(rank);
      if (isReleased && sums[rank].size() < static_cast<size_t>(entered[rank])) {
        sums[rank].push_back(job.result(rank).sum);
      }
      if (entered[rank] < kRounds && (entered[rank] == 0 || isReleased)) {
        ++entered[rank];
        job.at(rank).enter(static_cast<int64_t>(random() % 3));
      }
    };
    for (int step = 0; step < 100; ++step) {
      const Rank rank = living[random() % living.size()];
      if (living.size() > 1 && random() % 30 == 0) {
        std::erase(living, rank);
        job.die(rank);
      } else {
        look(rank);
      }
      job.deliverOne();
    }
    for (int round = 0; round <= kRounds; ++round) {
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
