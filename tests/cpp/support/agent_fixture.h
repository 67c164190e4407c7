#pragma once

// Agents in one process over a loopback network: the whole path of a call, with faults on demand.

#include "rpc/agent.h"

#include "eventually.h"
#include "gate.h"
#include "loopback_transport.h"
#include "memory/host_pool.h"
#include "outcome.h"
#include "torch_messages.h"
#include "wire/body.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {

using Fate = LoopbackNetwork::Fate;

class AgentTest : public testing::Test {
 protected:
  void SetUp() override {
    poolBytesAtStart_ = poolBytesInUse();
  }

  void TearDown() override {
    isInterrupted_.store(false);
    network_.setFault({});
    gate_->open();
    for (const auto& [rank, agent] : agents_) {
      agent->shutdown();
    }
    std::vector<std::weak_ptr<UcxRpcAgent>> watched;
    for (const auto& [rank, agent] : agents_) {
      watched.emplace_back(agent);
    }
    agents_.clear();
    EXPECT_TRUE(eventually([&] {
      return std::all_of(watched.begin(), watched.end(), [](const auto& agent) { return agent.expired(); });
    })) << "an agent is kept alive";
    EXPECT_TRUE(eventually([&] { return poolBytesInUse() == poolBytesAtStart_; })) << "receive buffers are leaked";
  }

  static Member memberOf(worker_id_t rank, uint64_t session, const std::string& address) {
    Member member;
    member.rank = rank;
    member.name = "w" + std::to_string(rank);
    member.host = "host";
    member.pid = 1000 + rank;
    member.bootId = "machine " + std::to_string(rank); // each looks as if on its own machine
    member.session = session;
    member.address = address;
    return member;
  }

  virtual std::unique_ptr<Transport> makeTransport(worker_id_t rank) {
    return network_.makeTransport("address " + std::to_string(rank));
  }

  // Returns the members as worker `rank` gets them. In a job with a secret they include its keys.
  virtual std::vector<Member> asToldTo(worker_id_t /*rank*/, std::vector<Member> members) {
    return members;
  }

  std::shared_ptr<UcxRpcAgent> makeAgent(worker_id_t rank, Handler handler, const AgentOptions& options = {}) {
    auto agent = std::make_shared<UcxRpcAgent>(
        "w" + std::to_string(rank),
        rank,
        makeTransport(rank),
        std::make_unique<Callback>(std::move(handler)),
        ThreadHooks{},
        [this] {
          if (isInterrupted_.load()) {
            throw Interrupted();
          }
          if (whileWaiting_) {
            whileWaiting_();
          }
        },
        options);
    return agent;
  }

  // Starts workers 0, 1, ..., all with the same handler.
  void start(worker_id_t size, const Handler& handler = &echo, const AgentOptions& options = {}) {
    std::vector<Member> members;
    for (worker_id_t rank = 0; rank < size; ++rank) {
      agents_[rank] = makeAgent(rank, handler, options);
      members.push_back(memberOf(rank, agents_[rank]->session(), agents_[rank]->address()));
    }
    for (const auto& [rank, agent] : agents_) {
      agent->group().addMembers(asToldTo(rank, members));
      agent->start();
    }
  }

  // Holds up "block" until the gate opens.
  Handler echoBehindGate() {
    return [this](Message& request) {
      if (textOf(request) == "block") {
        gate_->pass();
      }
      return echo(request);
    };
  }

  UcxRpcAgent& agent(worker_id_t rank) {
    return *agents_.at(rank);
  }

  Future call(
      worker_id_t from,
      worker_id_t to,
      const std::string& text,
      std::vector<at::Tensor> tensors = {},
      float timeoutSeconds = rpc::kUnsetRpcTimeout) {
    return agent(from).send(
        agent(from).getWorkerInfo(to),
        makeMessage(MessageType::PYTHON_CALL, text, std::move(tensors)),
        timeoutSeconds,
        {});
  }

  uint64_t metric(worker_id_t rank, const std::string& name) {
    return std::stoull(agent(rank).getMetrics().at(name));
  }

  // Sets the fate of all frames of this kind from this worker: of the bodies and spans of its messages.
  void fault(wire::Kind kind, worker_id_t source, Fate fate) {
    network_.setFault([=](const wire::Header& header, SendMode /*mode*/) {
      return header.kind == kind && header.sourceRank == static_cast<uint32_t>(source) ? fate : Fate::kDeliver;
    });
  }

  uint64_t poolBytesAtStart_ = 0;
  std::atomic<bool> isInterrupted_{false};
  std::function<void()> whileWaiting_; // waiting callers call it now and then; set it before they wait
  LoopbackNetwork network_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::map<worker_id_t, std::shared_ptr<UcxRpcAgent>> agents_;
};

} // namespace torch_ucx_rpc
