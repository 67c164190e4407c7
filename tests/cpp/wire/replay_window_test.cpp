#include "wire/replay_window.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

namespace torch_ucx_rpc::wire {
namespace {

TEST(ReplayWindowTest, NumbersInOrderCostNothing) {
  ReplayWindow window;
  for (uint64_t number = 0; number < 100'000; ++number) {
    ASSERT_TRUE(window.accept(number));
  }
  EXPECT_EQ(window.gaps(), 0u);
  EXPECT_FALSE(window.accept(0));
  EXPECT_FALSE(window.accept(99'999));
}

TEST(ReplayWindowTest, ALateNumberIsTakenOnceHoweverManyHaveOvertakenIt) {
  ReplayWindow window;
  for (uint64_t number = 1; number <= 1'000'000; ++number) {
    ASSERT_TRUE(window.accept(number));
  }
  EXPECT_TRUE(window.accept(0));
  EXPECT_FALSE(window.accept(0));
  EXPECT_EQ(window.gaps(), 0u);
}

TEST(ReplayWindowTest, EveryNumberIsTakenExactlyOnceInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    ReplayWindow window;
    std::set<uint64_t> taken;
    while (taken.size() < 300) {
      const uint64_t number = random() % 300;
      ASSERT_EQ(window.accept(number), taken.insert(number).second) << number;
    }
    EXPECT_EQ(window.gaps(), 0u);
  }
}

TEST(ReplayWindowTest, GapsAreBoundedAndTheOldestIsGivenUp) {
  ReplayWindow window;
  for (uint64_t number = 1; number <= 4 * ReplayWindow::kMaxGaps; number += 2) {
    ASSERT_TRUE(window.accept(number));
    ASSERT_LE(window.gaps(), ReplayWindow::kMaxGaps);
  }
  EXPECT_FALSE(window.accept(0)) << "given up: taken for a replay, not the other way round";
  EXPECT_TRUE(window.accept(4 * ReplayWindow::kMaxGaps - 2));
}

TEST(ReplayWindowTest, TheLastNumberDoesNotWrapAround) {
  ReplayWindow window;
  EXPECT_TRUE(window.accept(5));
  EXPECT_FALSE(window.accept(std::numeric_limits<uint64_t>::max()));
  EXPECT_TRUE(window.accept(std::numeric_limits<uint64_t>::max() - 1));
  EXPECT_FALSE(window.accept(5));
}

} // namespace
} // namespace torch_ucx_rpc::wire
