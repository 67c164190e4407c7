#include "wire/replay_window.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
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
    uint64_t missing = 0;
    while (taken.size() < 300) {
      const uint64_t number = random() % 300;
      ASSERT_EQ(window.hasCome(number), taken.contains(number)) << number;
      ASSERT_EQ(window.accept(number), taken.insert(number).second) << number;
      while (taken.contains(missing)) {
        ++missing;
      }
      ASSERT_EQ(window.firstMissing(), missing);
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
  EXPECT_FALSE(window.accept(0)) << "a number that was given up counts as a replay";
  EXPECT_TRUE(window.accept(4 * ReplayWindow::kMaxGaps - 2));
}

TEST(ReplayWindowTest, ASequenceBeginsAtTheGivenNumber) {
  ReplayWindow window(1);
  EXPECT_EQ(window.firstMissing(), 1u);
  EXPECT_FALSE(window.accept(0));
  EXPECT_TRUE(window.accept(3));
  EXPECT_EQ(window.missing(), (std::map<uint64_t, uint64_t>{{1, 3}}));
  EXPECT_EQ(window.next(), 4u);
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
