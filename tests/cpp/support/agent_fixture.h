#pragma once

// Agents of one process over a loopback network: the whole path of a call, with faults on demand.

#include "rpc/agent.h"

#include "eventually.h"
#include "gate.h"
#include "memory/host_pool.h"
#include "outcome.h"
#include "transport/loopback/loopback_transport.h"
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

namespace rpc = torch::distributed::rpc;
using rpc::MessageType;
using std::chrono::milliseconds;
using Fate = LoopbackNetwork::Fate;
using Future = c10::intrusive_ptr<JitFuture>;
using Handler = std::function<Future(Message&)>;

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;

inline c10::intrusive_ptr<Message> makeMessage(
    MessageType type, const std::string& text, std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<Message>(std::vector<char>(text.begin(), text.end()), std::move(tensors), type);
}

inline std::string textOf(const Message& message) {
  return {message.payload().begin(), message.payload().end()};
}

inline Future newFuture() {
  return c10::make_intrusive<JitFuture>(at::AnyClassType::get());
}

inline void complete(const Future& future, const std::string& text, std::vector<at::Tensor> tensors = {}) {
  c10::intrusive_ptr<Message> message = makeMessage(MessageType::PYTHON_RET, text, std::move(tensors));
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages = message->getStorages();
  future->markCompleted(std::move(message), std::move(storages));
}

inline Future completed(const std::string& text, std::vector<at::Tensor> tensors = {}) {
  Future future = newFuture();
  complete(future, text, std::move(tensors));
  return future;
}

inline Future echo(Message& request) {
  return completed(textOf(request), request.tensors());
}

// Waits for the answer; throws what the call failed with.
inline c10::intrusive_ptr<Message> answer(const Future& future) {
  if (!eventually([&] { return future->completed(); })) {
    throw std::runtime_error("no answer, and no error either");
  }
  if (future->hasError()) {
    throw std::runtime_error(future->tryRetrieveErrorMessage());
  }
  return future->constValue().toCustomClass<Message>();
}

// Waits for the call to fail, and says with what.
inline std::string failure(const Future& future) {
  EXPECT_TRUE(eventually([&] { return future->completed(); })) << "neither an answer nor an error";
  return future->hasError() ? future->tryRetrieveErrorMessage() : "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// `bytes` of tensor, every element `value`.
inline at::Tensor tensorOf(uint64_t bytes, double value = 1) {
  return at::full({static_cast<int64_t>(bytes / sizeof(float))}, value);
}

inline bool isAll(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

inline uint64_t poolBytesInUse() {
  return HostPool::instance().statistics().inUseBytes;
}

class Callback final : public rpc::RequestCallback {
 public:
  explicit Callback(Handler handler) : handler_(std::move(handler)) {}

 protected:
  Future processMessage(Message& request, std::vector<c10::Stream> /*streams*/) const override {
    return handler_(request);
  }

 private:
  const Handler handler_;
};

// What ends the wait of a caller, as Ctrl-C does.
struct Interrupted {};

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
    member.bootId = "machine " + std::to_string(rank); // each as if on a machine of its own
    member.session = session;
    member.address = address;
    return member;
  }

  virtual std::unique_ptr<Transport> makeTransport(worker_id_t rank) {
    return network_.makeTransport("address " + std::to_string(rank));
  }

  // What the worker is told of the others: in a job with a secret, its keys.
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

  // A job of workers 0, 1, ..., who all have the same handler.
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

  // Messages of this kind from this worker: held, dropped, ... A body is eager up to a size, spans are not.
  void fault(wire::Kind kind, worker_id_t source, Fate fate) {
    network_.setFault([=](const wire::Header& header, SendMode /*mode*/) {
      return header.kind == kind && header.sourceRank == static_cast<uint32_t>(source) ? fate : Fate::kDeliver;
    });
  }

  uint64_t poolBytesAtStart_ = 0;
  std::atomic<bool> isInterrupted_{false};
  std::function<void()> whileWaiting_; // what a caller that waits does now and then; set before it waits
  LoopbackNetwork network_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::map<worker_id_t, std::shared_ptr<UcxRpcAgent>> agents_;
};

} // namespace torch_ucx_rpc
