#include "messaging/dispatch_order.h"
#include "eventually.h"
#include "gate.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST(DispatchOrderTest, FollowUpRunsAtOnceWithoutEarlierOpenTurns) {
  DispatchOrder turns;
  turns.begin().end();
  DispatchOrder::Turn turn = turns.begin();
  const DispatchOrder::Turn later = turns.begin();
  bool hasRun = false;
  turn.end([&] { hasRun = true; });
  EXPECT_TRUE(hasRun);
}

TEST(DispatchOrderTest, FollowUpWaitsForAllEarlierTurns) {
  DispatchOrder turns;
  std::vector<int> ran;
  DispatchOrder::Turn first = turns.begin();
  DispatchOrder::Turn second = turns.begin();
  DispatchOrder::Turn third = turns.begin();
  third.end([&] { ran.push_back(3); });
  EXPECT_EQ(ran, std::vector<int>{});
  first.end([&] { ran.push_back(1); });
  EXPECT_EQ(ran, std::vector<int>{1});
  second.end();
  EXPECT_EQ(ran, (std::vector<int>{1, 3}));
}

TEST(DispatchOrderTest, FollowUpsRunInOrderOneAtATime) {
  DispatchOrder turns;
  Gate gate;
  std::vector<int> ran; // one thread writes at a time, else a sanitizer complains
  std::thread busy([&, turn = turns.begin()]() mutable {
    turn.end([&] {
      gate.pass();
      ran.push_back(1);
    });
  });
  EXPECT_TRUE(eventually([&] { return gate.waiting() == 1; }));
  DispatchOrder::Turn second = turns.begin();
  turns.begin().end([&] { ran.push_back(3); });
  second.end([&] {
    ran.push_back(2);
    turns.begin().end([&] { ran.push_back(4); }); // it must not run inside this call
    ran.push_back(-2);
  });
  gate.open();
  busy.join();
  EXPECT_EQ(ran, (std::vector<int>{1, 2, -2, 3, 4}));
}

TEST(DispatchOrderTest, ATurnEndsOnce) {
  DispatchOrder turns;
  int runs = 0;
  DispatchOrder::Turn turn = turns.begin();
  turn.end([&] { ++runs; });
  turn.end([&] { ++runs; });
  EXPECT_EQ(runs, 1);
}

TEST(DispatchOrderTest, ATurnThatIsForgottenEnds) {
  DispatchOrder turns;
  bool hasRun = false;
  {
    const DispatchOrder::Turn forgotten = turns.begin();
    turns.begin().end([&] { hasRun = true; });
    EXPECT_FALSE(hasRun);
  }
  EXPECT_TRUE(hasRun);
}

TEST(DispatchOrderTest, ATurnMovesWithItsOwner) {
  DispatchOrder turns;
  DispatchOrder::Turn moved;
  {
    DispatchOrder::Turn turn = turns.begin();
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
