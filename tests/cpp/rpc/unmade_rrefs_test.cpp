// A deletion of a reference to an unmade RRef is due again, once, when the owner has answered.

#include "rpc/unmade_rrefs.h"

#include "fake_rpc_agent.h"
#include "torch_messages.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <memory>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kCall = 7;
const rpc::RRefId kRRef(0, 100);

class UnmadeRRefsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { // torch reads its messages with the pickler of an agent
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0));
  }
  static void TearDownTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(nullptr);
  }
  static std::unique_ptr<Peer> makePeer(Rank rank) {
    Member member;
    member.rank = rank;
    return std::make_unique<Peer>(std::move(member));
  }
  static rpc::ForkId reference(int64_t number) {
    return {0, number};
  }
  static c10::intrusive_ptr<Message> deletionOf(const rpc::ForkId& reference) {
    return rpc::RRefUserDelete(kRRef, reference).toMessage();
  }

  const std::unique_ptr<Peer> owner_ = makePeer(1);
  const std::unique_ptr<Peer> other_ = makePeer(2);
  UnmadeRRefs unmade_;
};

TEST_F(UnmadeRRefsTest, DeletionIsDueAgainWhenTheOwnerHasAnswered) {
  unmade_.add(kCall, *owner_);
  unmade_.giveUp(kCall, reference(1));
  EXPECT_FALSE(unmade_.owesAny()) << "torch has not deleted the reference";
  unmade_.noteDeletion(*deletionOf(reference(1)));
  EXPECT_TRUE(unmade_.owesAny());
  EXPECT_EQ(unmade_.take(kCall, *other_), nullptr) << "another worker was not asked";
  const c10::intrusive_ptr<Message> again = unmade_.take(kCall, *owner_);
  ASSERT_NE(again, nullptr);
  const auto [rref, fork] = rpc::ForkMessageBase::fromMessage(*again, MessageType::RREF_USER_DELETE);
  EXPECT_TRUE(rref == kRRef);
  EXPECT_TRUE(fork == reference(1));
  EXPECT_FALSE(unmade_.owesAny());
  EXPECT_EQ(unmade_.take(kCall, *owner_), nullptr);
}

TEST_F(UnmadeRRefsTest, OtherDeletionsAreNotSentAgain) {
  unmade_.noteDeletion(*deletionOf(reference(1)));
  unmade_.add(kCall, *owner_);
  unmade_.noteDeletion(*deletionOf(reference(1))); // rpc.remote() has not timed out
  unmade_.giveUp(kCall, reference(1));
  unmade_.noteDeletion(*deletionOf(reference(2)));
  EXPECT_FALSE(unmade_.owesAny());
  EXPECT_EQ(unmade_.take(kCall, *owner_), nullptr);
}

TEST_F(UnmadeRRefsTest, NothingIsDueToAnOwnerThatAnswersAsTheTimeRunsOut) {
  unmade_.add(kCall, *owner_);
  EXPECT_EQ(unmade_.take(kCall, *owner_), nullptr);
  unmade_.giveUp(kCall, reference(1));
  unmade_.noteDeletion(*deletionOf(reference(1)));
  EXPECT_FALSE(unmade_.owesAny());
}

TEST_F(UnmadeRRefsTest, AnswersAreAwaitedUntilTheyCome) {
  EXPECT_FALSE(unmade_.isAwaited(kCall, *owner_));
  unmade_.add(kCall, *owner_);
  EXPECT_TRUE(unmade_.isAwaited(kCall, *owner_));
  EXPECT_FALSE(unmade_.isAwaited(kCall, *other_));
  EXPECT_FALSE(unmade_.isAwaited(kCall + 1, *owner_));
  (void)unmade_.take(kCall, *owner_);
  EXPECT_FALSE(unmade_.isAwaited(kCall, *owner_));
}

TEST_F(UnmadeRRefsTest, NothingIsDueToAnOwnerThatIsGone) {
  unmade_.add(kCall, *owner_);
  unmade_.add(kCall + 1, *other_);
  unmade_.giveUp(kCall, reference(1));
  unmade_.giveUp(kCall + 1, reference(2));
  unmade_.noteDeletion(*deletionOf(reference(1)));
  unmade_.noteDeletion(*deletionOf(reference(2)));
  unmade_.forget(*owner_);
  EXPECT_EQ(unmade_.take(kCall, *owner_), nullptr);
  EXPECT_TRUE(unmade_.owesAny());
  EXPECT_NE(unmade_.take(kCall + 1, *other_), nullptr);
}

} // namespace
} // namespace torch_ucx_rpc
