#pragma once

#include "agent_parts_of.h"
#include "handlers.h"
#include "rpc/call_client.h"
#include "tensors/self_copy.h"
#include "tensors/tensor_codec.h"
#include "test_worker.h"
#include "torch_messages.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Calls of worker 0. The test is the callee.
class CallClientTest : public testing::Test {
 protected:
  explicit CallClientTest(const std::vector<Member>& members = membersOf(3)) : members_(members) {
    mine_.answers = &calls_;
    one_.startThreads();
  }
  ~CallClientTest() override {
    one_.close();
    calls_.shutDown();
    two_.close();
    EXPECT_TRUE(eventually([&] { return one_.holds() == 0 || hasEnded_; })) << "the agent is kept alive";
    for (Rank rank = 1; rank <= 2; ++rank) {
      EXPECT_EQ(one_.peer(rank).eagerBytesOpen.load(), 0u);
    }
  }

  Future call(
      const std::string& text = "call",
      milliseconds timeout = milliseconds(0),
      MessageType type = MessageType::PYTHON_CALL,
      Rank to = 1) {
    return calls_.send(one_.peer(to), makeMessage(type, text), timeout, {});
  }
  // The id of the last call that reached the callee.
  uint64_t arrivedCall() {
    two_.takeIn();
    return callee_.requests.empty() ? ~0ull : callee_.requests.back().header.callId;
  }
  // Answers as the callee, and lets the caller take in the answer.
  void answerWith(uint64_t callId, const c10::intrusive_ptr<Message>& message) {
    Peer& caller = two_.peer(0);
    two_.messenger.post(
        caller, wire::Kind::kResponse, callId, encodeMessage(message, caller, {}, &two_.messenger.transport()));
    one_.takeIn();
  }
  void answerWith(uint64_t callId, const std::string& text) {
    answerWith(callId, makeMessage(MessageType::PYTHON_RET, text));
  }
  void endCallee(Peer::State state, ErrorCode code, const std::string& why) {
    Peer& callee = one_.peer(1);
    Error error(code, why);
    ASSERT_TRUE(callee.moveTo(state, state == Peer::State::kFailed ? callee.lost(error) : std::move(error)));
    calls_.onPeerGone(callee);
  }
  void endLifetime() {
    hasEnded_ = true;
    one_.endLifetime();
  }

  const std::vector<Member> members_;
  LoopbackNetwork network_;
  Handlers others_;
  Handlers callee_;
  EventHandlers mine_ = others_.all;
  TestWorker one_{network_, 0, members_, mine_, &copyForSelf};
  TestWorker two_{network_, 1, members_, callee_.all, &copyForSelf};
  TestWorker three_{network_, 2, members_, others_.all, &copyForSelf};
  DeviceMaps deviceMaps_;
  bool isInterrupted_ = false;
  bool hasEnded_ = false;
  CallClient calls_{partsOf(one_), deviceMaps_, [this] {
                      if (isInterrupted_) {
                        throw Interrupted();
                      }
                    }};
};

} // namespace torch_ucx_rpc
