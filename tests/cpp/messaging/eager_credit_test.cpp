// The bounds on the bytes that a receiver holds and has not asked for, from one sender and from all.

#include "messaging/eager_credit.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kOverhead = EagerCredit::kOverhead;
constexpr uint64_t kMost = EagerCredit::kMaxBytesOfLarger - kOverhead;
constexpr uint64_t kSmall = EagerCredit::kSmallBytes;

class EagerCreditTest : public testing::Test {
 protected:
  static Member named(const char* name) {
    Member member;
    member.name = name;
    return member;
  }
  bool take(EagerCredit& credit, uint64_t bytes) {
    return credit.take(peer_, bytes, share_);
  }

  PushShare share_;
  Peer peer_{named("one")};
  Peer other_{named("other")};
};

TEST_F(EagerCreditTest, CreditIsGivenBackWithTheCall) {
  {
    EagerCredit credit;
    EXPECT_TRUE(take(credit, 100'000));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 100'000 + kOverhead);
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
}

TEST_F(EagerCreditTest, BodyBeyondTheLimitMustWaitAtTheSender) {
  EagerCredit most;
  EXPECT_TRUE(take(most, kMost)) << "the limit itself is allowed";
  {
    EagerCredit more;
    EXPECT_FALSE(take(more, kSmall + 1));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), kMost + kOverhead) << "a refused credit is not counted";
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), kMost + kOverhead) << "and gives nothing back";
}

TEST_F(EagerCreditTest, SmallBodyDoesNotWaitForLargerOnes) {
  EagerCredit most;
  ASSERT_TRUE(take(most, kMost));
  EagerCredit small;
  EXPECT_TRUE(take(small, kSmall));
}

TEST_F(EagerCreditTest, SmallBodiesUseUpTheWholeShare) {
  std::vector<EagerCredit> credits(share_.bytes() / (1 + kOverhead));
  for (EagerCredit& credit : credits) {
    ASSERT_TRUE(take(credit, 1));
  }
  EagerCredit more;
  EXPECT_FALSE(take(more, 1));
  credits.pop_back();
  EXPECT_TRUE(take(more, 1));
}

TEST_F(EagerCreditTest, AllSendersTogetherStayWithinOneBudget) {
  for (const size_t workers : {2, 3, 100, 10'000}) {
    share_.setWorkers(workers);
    uint64_t pushed = 0;
    std::vector<EagerCredit> credits(PushShare::kBudgetBytes / (1000 + kOverhead) + 1);
    for (EagerCredit& credit : credits) {
      pushed += take(credit, 1000) ? 1000 : 0;
    }
    EXPECT_GT(pushed, 0u) << workers;
    EXPECT_LE(pushed * (workers - 1), PushShare::kBudgetBytes) << workers;
  }
}

TEST_F(EagerCreditTest, WorkersShareTheNumberOfAnnouncedParts) {
  EXPECT_EQ(share_.parts(), PushShare::kMaxParts);
  share_.setWorkers(1025);
  EXPECT_EQ(share_.parts(), 4u);
  share_.setWorkers(1'000'000);
  EXPECT_EQ(share_.parts(), 1u) << "else nothing would leave";
  share_.setWorkers(0);
  EXPECT_EQ(share_.parts(), PushShare::kMaxParts);
}

TEST_F(EagerCreditTest, RoomComesBackWhenACallEnds) {
  std::optional<EagerCredit> first(std::in_place);
  ASSERT_TRUE(take(*first, kMost));
  EagerCredit next;
  ASSERT_FALSE(take(next, kMost));
  first.reset();
  EXPECT_TRUE(take(next, kMost));
}

TEST_F(EagerCreditTest, EachPeerHasItsOwnCredit) {
  EagerCredit one;
  EagerCredit other;
  EXPECT_TRUE(one.take(peer_, kMost, share_));
  EXPECT_TRUE(other.take(other_, kMost, share_));
}

TEST_F(EagerCreditTest, MovedCreditIsGivenBackOnce) {
  EagerCredit first;
  ASSERT_TRUE(take(first, 10'000));
  {
    EagerCredit moved(std::move(first));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 10'000 + kOverhead);
    EagerCredit assigned;
    ASSERT_TRUE(assigned.take(other_, 20'000, share_));
    {
      EagerCredit target;
      target = std::move(moved);
      EXPECT_EQ(peer_.eagerBytesOpen.load(), 10'000 + kOverhead);
    }
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
    EXPECT_EQ(other_.eagerBytesOpen.load(), 20'000 + kOverhead);
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
  EXPECT_EQ(other_.eagerBytesOpen.load(), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
