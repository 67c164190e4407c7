#include "agent/turns.h"

#include <gtest/gtest.h>

#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST(TurnsTest, WhatFollowsATurnRunsAtOnceWhenNoEarlierOneIsOpen) {
  Turns turns;
  turns.begin().end();
  Turns::Turn turn = turns.begin();
  const Turns::Turn later = turns.begin();
  bool hasRun = false;
  turn.end([&] { hasRun = true; });
  EXPECT_TRUE(hasRun);
}

TEST(TurnsTest, WhatFollowsATurnWaitsForAllEarlierOnes) {
  Turns turns;
  std::vector<int> ran;
  Turns::Turn first = turns.begin();
  Turns::Turn second = turns.begin();
  Turns::Turn third = turns.begin();
  third.end([&] { ran.push_back(3); });
  EXPECT_EQ(ran, std::vector<int>{});
  first.end([&] { ran.push_back(1); });
  EXPECT_EQ(ran, std::vector<int>{1});
  second.end();
  EXPECT_EQ(ran, (std::vector<int>{1, 3}));
}

TEST(TurnsTest, ATurnEndsOnce) {
  Turns turns;
  int runs = 0;
  Turns::Turn turn = turns.begin();
  turn.end([&] { ++runs; });
  turn.end([&] { ++runs; });
  EXPECT_EQ(runs, 1);
}

TEST(TurnsTest, ATurnThatIsForgottenEnds) {
  Turns turns;
  bool hasRun = false;
  {
    const Turns::Turn forgotten = turns.begin();
    turns.begin().end([&] { hasRun = true; });
    EXPECT_FALSE(hasRun);
  }
  EXPECT_TRUE(hasRun);
}

TEST(TurnsTest, ATurnMovesWithItsOwner) {
  Turns turns;
  Turns::Turn moved;
  {
    Turns::Turn turn = turns.begin();
    moved = std::move(turn);
  }
  bool hasRun = false;
  turns.begin().end([&] { hasRun = true; });
  EXPECT_FALSE(hasRun);
  moved.end();
  EXPECT_TRUE(hasRun);
}

} // namespace
} // namespace torch_ucx_rpc
