// How much of what is sent unasked its receiver may have to hold.

#include "messaging/eager_credit.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kMost = EagerCredit::kMaxBytes;
constexpr uint64_t kFree = EagerCredit::kFreeBytes;

class EagerCreditTest : public testing::Test {
 protected:
  static Member named(const char* name) {
    Member member;
    member.name = name;
    return member;
  }

  Peer peer_{named("one")};
  Peer other_{named("other")};
};

TEST_F(EagerCreditTest, CreditIsGivenBackWithTheCall) {
  {
    EagerCredit credit;
    EXPECT_TRUE(credit.take(peer_, 100'000));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 100'000u);
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
}

TEST_F(EagerCreditTest, BodyBeyondTheLimitIsToWaitAtTheSender) {
  EagerCredit most;
  EXPECT_TRUE(most.take(peer_, kMost)) << "the limit itself is allowed";
  {
    EagerCredit more;
    EXPECT_FALSE(more.take(peer_, kFree + 1));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), kMost) << "a credit that was not had counts nothing";
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), kMost) << "and gives nothing back";
}

TEST_F(EagerCreditTest, SmallBodyNeverWaitsAndIsNotCounted) {
  EagerCredit most;
  ASSERT_TRUE(most.take(peer_, kMost));
  EagerCredit small;
  EXPECT_TRUE(small.take(peer_, kFree));
  EXPECT_EQ(peer_.eagerBytesOpen.load(), kMost);
}

TEST_F(EagerCreditTest, RoomComesBackWhenACallEnds) {
  std::optional<EagerCredit> first(std::in_place);
  ASSERT_TRUE(first->take(peer_, kMost));
  EagerCredit next;
  ASSERT_FALSE(next.take(peer_, kMost));
  first.reset();
  EXPECT_TRUE(next.take(peer_, kMost));
}

TEST_F(EagerCreditTest, PeersHaveACreditEach) {
  EagerCredit one;
  EagerCredit other;
  EXPECT_TRUE(one.take(peer_, kMost));
  EXPECT_TRUE(other.take(other_, kMost));
}

TEST_F(EagerCreditTest, MovedCreditIsGivenBackOnce) {
  EagerCredit first;
  ASSERT_TRUE(first.take(peer_, 10'000));
  {
    EagerCredit moved(std::move(first));
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 10'000u);
    EagerCredit assigned;
    ASSERT_TRUE(assigned.take(other_, 20'000));
    {
      EagerCredit target;
      target = std::move(moved);
      EXPECT_EQ(peer_.eagerBytesOpen.load(), 10'000u);
    }
    EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
    EXPECT_EQ(other_.eagerBytesOpen.load(), 20'000u);
  }
  EXPECT_EQ(peer_.eagerBytesOpen.load(), 0u);
  EXPECT_EQ(other_.eagerBytesOpen.load(), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
