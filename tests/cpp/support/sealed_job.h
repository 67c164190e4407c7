#pragma once

#include "agent_fixture.h"

#include "wire/seal.h"

namespace torch_ucx_rpc {

// A job with a secret, over the loopback network. Its keys have the same roles as in
// torch_ucx_rpc/_bootstrap/secret.py, but are readable.
class SealedAgentTest : public AgentTest {
 protected:
  static std::string keyOf(worker_id_t from, worker_id_t to) {
    return "frames of " + std::to_string(from) + " to " + std::to_string(to);
  }
  static std::string joinKeyOf(worker_id_t to) {
    return "joins at " + std::to_string(to);
  }

  std::vector<Member> asToldTo(worker_id_t rank, std::vector<Member> members) override {
    for (Member& member : members) {
      member.sendKey = keyOf(rank, member.rank);
      member.receiveKey = keyOf(member.rank, rank);
      member.joinKey = joinKeyOf(member.rank);
    }
    return members;
  }
};

// A job with a secret, and a forger of frames.
class ForgedFrameTest : public SealedAgentTest {
 protected:
  void SetUp() override {
    SealedAgentTest::SetUp();
    start(2, [this](Message& request) {
      handled_.fetch_add(1);
      return echo(request);
    });
  }

  // Forges a frame from worker 1 to worker 0.
  wire::Header frame(wire::Kind kind) {
    wire::Header header;
    header.kind = kind;
    header.sourceRank = 1;
    header.sourceSession = agent(1).session();
    header.targetSession = agent(0).session();
    header.callId = callId_++;
    return header;
  }
  static Bytes bodyOfRequest(const std::string& text) {
    wire::BodyWriter writer(MessageType::PYTHON_CALL);
    writer.setInlinePayload(text);
    return writer.finish();
  }

  std::atomic<int> handled_{0};
  uint64_t callId_ = 1'000'000; // greater than the workers' own call ids
};

} // namespace torch_ucx_rpc
