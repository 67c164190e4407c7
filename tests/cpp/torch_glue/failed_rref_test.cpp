// If rpc.remote() has failed, the caller describes the RRef, and the owner makes an RRef with the error.

#include "torch_glue/failed_rref.h"

#include "fake_rpc_agent.h"
#include "torch_glue/torch_state.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <memory>
#include <string>

namespace torch_ucx_rpc {
namespace {

using rpc::RRefContext;

class FailedRRefTest : public testing::Test {
 protected:
  // torch has one set of tables per process. Here worker 0 is both the caller and the owner.
  static void SetUpTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<FakeRpcAgent>(0));
  }
  static void TearDownTestSuite() {
    rpc::RpcAgent::setCurrentRpcAgent(nullptr);
  }

  // Makes an RRef as rpc.remote() does if worker 1 is the owner.
  void create(const c10::TypePtr& type) {
    rref_ = context_.createUserRRef(1, type);
    rref_->registerOwnerCreationFuture(creation_);
    context_.addPendingUser(rref_->forkId(), rref_);
  }
  c10::intrusive_ptr<rpc::OwnerRRef> made() {
    return rpc::fromRRefInterface(context_.getOwnerRRef(rref_->rrefId())->constValue().toRRef());
  }
  void TearDown() override {
    if (rref_ != nullptr) {
      context_.delPendingUser(rref_->forkId());
      (void)context_.delForkOfOwner(rref_->rrefId(), rref_->forkId());
    }
  }

  RRefContext& context_ = RRefContext::getInstance();
  const Future creation_ = newFuture();
  c10::intrusive_ptr<rpc::UserRRef> rref_;
};

TEST_F(FailedRRefTest, OwnerMakesAnRRefWhoseValueIsTheError) {
  create(c10::PyObjectType::get());
  const auto request = describeFailedRRef(*creation_, "no such module");
  ASSERT_TRUE(request);
  EXPECT_TRUE(isFailedRRef(*request));
  const Future wait = context_.getOwnerRRef(rref_->rrefId()); // a worker asked before
  EXPECT_FALSE(wait->completed());

  const auto ret = rpc::RemoteRet::fromMessage(*answer(makeFailedRRef(*request)));
  EXPECT_EQ(ret->rrefId(), rref_->rrefId());
  EXPECT_EQ(ret->forkId(), rref_->forkId());
  EXPECT_TRUE(wait->completed());
  EXPECT_EQ(failure(made()->getFuture()), "no such module");
  EXPECT_TRUE(made()->isPyObj());
  EXPECT_EQ(heldForks().size(), 1u);
}

TEST_F(FailedRRefTest, RepeatedRequestChangesNothing) {
  create(c10::PyObjectType::get());
  (void)makeFailedRRef(*describeFailedRRef(*creation_, "the first"));
  EXPECT_EQ(answer(makeFailedRRef(*describeFailedRRef(*creation_, "the second")))->type(), MessageType::REMOTE_RET);
  EXPECT_EQ(failure(made()->getFuture()), "the first");
}

// rpc.remote() succeeded, and only its answer was lost.
TEST_F(FailedRRefTest, RRefThatHasAValueKeepsIt) {
  create(c10::PyObjectType::get());
  context_.getOrCreateOwnerRRef(rref_->rrefId(), c10::PyObjectType::get())->setValue(c10::IValue(7));
  context_.addForkOfOwner(rref_->rrefId(), rref_->forkId());
  (void)makeFailedRRef(*describeFailedRRef(*creation_, "too late"));
  EXPECT_EQ(made()->getValue().toInt(), 7);
}

TEST_F(FailedRRefTest, TypesOfTorchScriptAreKept) {
  const c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  create(type);
  (void)makeFailedRRef(*describeFailedRRef(*creation_, "no such function"));
  EXPECT_EQ(*made()->type(), *type);
}

TEST_F(FailedRRefTest, ClassThatTheOwnerDoesNotHaveIsAnyType) {
  create(c10::ClassType::create(c10::QualifiedName("__torch__.Unknown"), {}));
  (void)makeFailedRRef(*describeFailedRRef(*creation_, "no such class"));
  EXPECT_EQ(failure(made()->getFuture()), "no such class");
}

TEST_F(FailedRRefTest, CallToOneselfFailsTheCallersRRef) {
  auto mine = context_.createOwnerRRef(c10::PyObjectType::get());
  context_.addSelfAsFork(mine);
  mine->registerOwnerCreationFuture(creation_);
  (void)makeFailedRRef(*describeFailedRRef(*creation_, "of oneself"));
  EXPECT_EQ(failure(mine->getFuture()), "of oneself");
  (void)context_.delForkOfOwner(mine->rrefId(), mine->rrefId());
}

TEST_F(FailedRRefTest, NothingIsDescribedBeforeTorchKnowsTheRRef) {
  EXPECT_FALSE(describeFailedRRef(*creation_, "why"));
}

TEST_F(FailedRRefTest, MalformedRequestThrows) {
  EXPECT_ANY_THROW((void)makeFailedRRef(*makeMessage(MessageType::EXCEPTION, "anything")));
  EXPECT_FALSE(isFailedRRef(*makeMessage(MessageType::PYTHON_REMOTE_CALL, "anything")));
}

} // namespace
} // namespace torch_ucx_rpc
