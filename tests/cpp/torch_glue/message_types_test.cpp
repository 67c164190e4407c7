// The type and contents of a request decide how it is handled.

#include "torch_glue/message_types.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_profiling_req.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;
using Types = std::set<MessageType>;

const std::vector<MessageType> kRequests{
    MessageType::SCRIPT_CALL,
    MessageType::PYTHON_CALL,
    MessageType::SCRIPT_REMOTE_CALL,
    MessageType::PYTHON_REMOTE_CALL,
    MessageType::SCRIPT_RREF_FETCH_CALL,
    MessageType::PYTHON_RREF_FETCH_CALL,
    MessageType::RREF_USER_DELETE,
    MessageType::RREF_FORK_REQUEST,
    MessageType::RREF_CHILD_ACCEPT,
    MessageType::FORWARD_AUTOGRAD_REQ,
    MessageType::BACKWARD_AUTOGRAD_REQ,
    MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ,
    MessageType::RUN_WITH_PROFILING_REQ,
    MessageType::EXCEPTION, // see failed_rref.h
};

c10::intrusive_ptr<Message> requestOf(MessageType type, const std::string& payload) {
  return c10::make_intrusive<Message>(
      std::vector<char>(payload.begin(), payload.end()), std::vector<at::Tensor>{}, type);
}

c10::intrusive_ptr<Message> withAutograd(c10::intrusive_ptr<Message> request) {
  namespace autograd = torch::distributed::autograd;
  return autograd::RpcWithAutograd(
             0, MessageType::FORWARD_AUTOGRAD_REQ, autograd::AutogradMetadata(1, 2), std::move(request))
      .toMessage();
}

c10::intrusive_ptr<Message> withProfiling(c10::intrusive_ptr<Message> request) {
  torch::autograd::profiler::ProfilerConfig config(torch::autograd::profiler::ProfilerState::CPU);
  return torch::distributed::autograd::RpcWithProfilingReq(
             MessageType::RUN_WITH_PROFILING_REQ, std::move(request), std::move(config), {0, 1})
      .toMessage();
}

template <typename Predicate>
Types those(Predicate is) {
  Types types;
  for (const MessageType type : kRequests) {
    if (is(type)) {
      types.insert(type);
    }
  }
  return types;
}

TEST(MessageTypesTest, OnlyRequestsForPythonFunctionsCallPython) {
  EXPECT_EQ(
      those(&runsPython),
      (Types{
          MessageType::PYTHON_CALL,
          MessageType::PYTHON_REMOTE_CALL,
          MessageType::PYTHON_RREF_FETCH_CALL,
          MessageType::FORWARD_AUTOGRAD_REQ,
          MessageType::RUN_WITH_PROFILING_REQ,
          MessageType::EXCEPTION}));
}

TEST(MessageTypesTest, OnlyRequestsOfToHereAreFetches) {
  EXPECT_EQ(those(&isFetch), (Types{MessageType::SCRIPT_RREF_FETCH_CALL, MessageType::PYTHON_RREF_FETCH_CALL}));
}

TEST(MessageTypesTest, DriverRunsOnlyRequestsThatDestroyNoUserObjects) {
  EXPECT_EQ(those(&mayRunOnDriver), (Types{MessageType::RREF_CHILD_ACCEPT}));
}

TEST(MessageTypesTest, DriverCompletesOnlyCallsWithoutWaiters) {
  EXPECT_EQ(
      those(&mayCompleteOnDriver),
      (Types{
          MessageType::RREF_CHILD_ACCEPT, MessageType::RREF_USER_DELETE, MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ}));
}

TEST(MessageTypesTest, RequestsThatOthersNeedMustExecute) {
  EXPECT_EQ(
      those([](MessageType type) { return mustExecute(*requestOf(type, "anything")); }),
      (Types{
          MessageType::PYTHON_REMOTE_CALL,
          MessageType::SCRIPT_REMOTE_CALL,
          MessageType::RREF_FORK_REQUEST,
          MessageType::RREF_CHILD_ACCEPT,
          MessageType::RREF_USER_DELETE,
          MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ}));
}

TEST(MessageTypesTest, CreationOfAnRRefIsSeenThroughAutogradAndProfiler) {
  for (const MessageType type :
       {MessageType::PYTHON_REMOTE_CALL, MessageType::SCRIPT_REMOTE_CALL, MessageType::PYTHON_CALL}) {
    const bool isCreation = type != MessageType::PYTHON_CALL;
    EXPECT_EQ(makesRRef(*requestOf(type, "anything")), isCreation);
    EXPECT_EQ(makesRRef(*withAutograd(requestOf(type, "anything"))), isCreation);
    EXPECT_EQ(makesRRef(*withProfiling(requestOf(type, "anything"))), isCreation);
    EXPECT_EQ(makesRRef(*withProfiling(withAutograd(requestOf(type, "anything")))), isCreation);
    EXPECT_EQ(mustExecute(*withAutograd(requestOf(type, "anything"))), isCreation);
  }
}

TEST(MessageTypesTest, PayloadWithoutTorchsWrapperIsNotRecognized) {
  const std::string wrapped = [] {
    const auto message = withAutograd(requestOf(MessageType::PYTHON_REMOTE_CALL, "anything"));
    return std::string(message->payload().begin(), message->payload().end());
  }();
  for (size_t length = 0; length < wrapped.size(); ++length) {
    EXPECT_FALSE(makesRRef(*requestOf(MessageType::FORWARD_AUTOGRAD_REQ, wrapped.substr(0, length)))) << length;
  }
  EXPECT_FALSE(makesRRef(*requestOf(MessageType::FORWARD_AUTOGRAD_REQ, std::string(8, '\0'))));
  EXPECT_FALSE(makesRRef(*requestOf(MessageType::FORWARD_AUTOGRAD_REQ, "\x80" + std::string(7, '\0') + '\1')));
  EXPECT_FALSE(makesRRef(*requestOf(MessageType::FORWARD_AUTOGRAD_REQ, std::string(64, '\xff'))));
}

TEST(MessageTypesTest, CallsWithRRefsMustExecute) {
  EXPECT_TRUE(mustExecute(*requestOf(MessageType::PYTHON_CALL, "torch _InternalRPCPickler._py_rref_receiver (")));
  EXPECT_TRUE(mustExecute(*requestOf(MessageType::FORWARD_AUTOGRAD_REQ, "ctorch.distributed.rpc\nrref\n (")));
  EXPECT_FALSE(mustExecute(*requestOf(MessageType::PYTHON_CALL, "torch.distributed.rpc rref")));
  EXPECT_FALSE(mustExecute(*requestOf(MessageType::PYTHON_CALL, "")));
}

TEST(MessageTypesTest, NoticesToGoneWorkersHaveAnAnswerOfTheRightType) {
  EXPECT_EQ(
      those([](MessageType type) { return syntheticAck(type) != nullptr; }),
      (Types{
          MessageType::RREF_FORK_REQUEST,
          MessageType::RREF_CHILD_ACCEPT,
          MessageType::RREF_USER_DELETE,
          MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ}));
  for (const MessageType type :
       {MessageType::RREF_FORK_REQUEST, MessageType::RREF_CHILD_ACCEPT, MessageType::RREF_USER_DELETE}) {
    EXPECT_EQ(syntheticAck(type)->type(), MessageType::RREF_ACK);
  }
  EXPECT_EQ(
      syntheticAck(MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ)->type(), MessageType::CLEANUP_AUTOGRAD_CONTEXT_RESP);
}

} // namespace
} // namespace torch_ucx_rpc
