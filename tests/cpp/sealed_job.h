#pragma once

#include "agent_fixture.h"

#include "wire/seal.h"

namespace torch_ucx_rpc {

// A job with a secret, over the loopback network; keys as torch_ucx_rpc/_secret.py gives them out, but readable.
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

} // namespace torch_ucx_rpc
