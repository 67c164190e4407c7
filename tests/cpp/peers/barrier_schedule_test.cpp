// Barriers in random schedules of messages, departures and deaths.

#include "barrier_job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

struct Shape {
  Rank workers;
  int fanOut;
  bool doOnlyContactsNotice = false; // else all workers notice an end
};

// `make nightly` runs three times as many.
unsigned schedules() {
  const char* const factor = std::getenv("SCHEDULES");
  return 2000 * static_cast<unsigned>(factor == nullptr ? 1 : std::atoi(factor));
}

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

// Workers leave or die before, in and after a round. The others learn of it at different times. Each round releases all
// living workers with the same sum, and names no living worker as dead.
TEST_P(BarrierScheduleTest, LivingWorkersAreReleasedWithOneSum) {
  const Shape shape = GetParam();
  for (unsigned seed = 0; seed < schedules(); ++seed) {
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
    const bool doDie = seed % 3 != 0; // else workers say goodbye
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
    // The workers notice each end after a few exchanges at most.
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
