// The channel of an agent, for torch_ucx_rpc/channel. All functions that may wait do so without the GIL.

#include "base/time.h"
#include "bindings/bindings.h"
#include "rpc/agent.h"

#include <torch/csrc/distributed/rpc/python_functions.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

using NoGil = py::call_guard<WithoutGil>;

// Python's objects may outlive the agent.
class AgentOfValue {
 public:
  explicit AgentOfValue(const std::shared_ptr<UcxRpcAgent>& agent) : agent_(agent) {}

  // Throws RpcFailure if the agent is gone, or belongs to another process.
  std::shared_ptr<UcxRpcAgent> operator()() const {
    std::shared_ptr<UcxRpcAgent> agent = agent_.lock();
    if (agent == nullptr) {
      throw RpcFailure(RpcFailure::Kind::kShutDown, "RPC has been shut down on this worker");
    }
    agent->checkProcess();
    return agent;
  }
  std::shared_ptr<UcxRpcAgent> ifAlive() const {
    return agent_.lock();
  }

 private:
  std::weak_ptr<UcxRpcAgent> agent_;
};

// None: the agent's default.
std::chrono::milliseconds timeoutOf(const UcxRpcAgent& agent, std::optional<double> seconds) {
  return seconds ? toMilliseconds(*seconds) : agent.getRpcTimeout();
}

struct ChannelOfAgent {
  AgentOfValue agent;
};

class SentValue {
 public:
  SentValue(AgentOfValue agent, std::shared_ptr<Channel::Sent> sent)
      : agent_(std::move(agent)), sent_(std::move(sent)) {}

  void wait() const {
    agent_()->channel().wait(sent_);
  }

 private:
  AgentOfValue agent_;
  std::shared_ptr<Channel::Sent> sent_;
};

class PostedValue {
 public:
  PostedValue(AgentOfValue agent, std::shared_ptr<Channel::Expected> expected)
      : agent_(std::move(agent)), expected_(std::move(expected)) {}
  PostedValue(const PostedValue&) = delete;
  PostedValue& operator=(const PostedValue&) = delete;
  ~PostedValue() {
    if (const std::shared_ptr<UcxRpcAgent> agent = agent_.ifAlive()) {
      agent->channel().cancel(expected_);
    }
  }

  Channel::Value wait(std::optional<double> timeout) const {
    const std::shared_ptr<UcxRpcAgent> agent = agent_();
    return agent->channel().wait(expected_, timeoutOf(*agent, timeout));
  }

 private:
  AgentOfValue agent_;
  std::shared_ptr<Channel::Expected> expected_;
};

py::object asPython(Channel::Value value) {
  return value.isSingle && value.tensors.size() == 1 ? py::cast(value.tensors.front()) : py::cast(value.tensors);
}

} // namespace

void bindChannels(py::module_& module) {
  py::class_<SentValue>(module, "SentValue").def("wait", &SentValue::wait, NoGil());
  py::class_<PostedValue>(module, "PostedValue")
      .def(
          "wait",
          [](const PostedValue& posted, std::optional<double> timeout) {
            Channel::Value value;
            {
              const WithoutGil noGil;
              value = posted.wait(timeout);
            }
            return asPython(std::move(value));
          },
          py::arg("timeout") = std::nullopt);
  py::class_<ChannelOfAgent>(module, "ChannelOfAgent")
      .def(
          "advance",
          [](const ChannelOfAgent& self, const std::string& group, uint64_t epoch) {
            self.agent()->channel().advance(group, epoch);
          },
          py::arg("group"),
          py::arg("epoch"),
          NoGil())
      .def(
          "advance_all",
          [](const ChannelOfAgent& self, const std::string& prefix, uint64_t epoch) {
            self.agent()->channel().advanceAll(prefix, epoch);
          },
          py::arg("prefix"),
          py::arg("epoch"),
          NoGil())
      .def(
          "close",
          [](const ChannelOfAgent& self, const std::string& group) { self.agent()->channel().close(group); },
          py::arg("group"),
          NoGil())
      .def(
          "put",
          [](const ChannelOfAgent& self,
             std::string group,
             uint64_t epoch,
             const std::string& to,
             std::string tag,
             std::vector<at::Tensor> tensors,
             bool isSingle,
             std::optional<double> timeout) {
            const std::shared_ptr<UcxRpcAgent> agent = self.agent();
            return std::make_unique<SentValue>(
                self.agent,
                agent->channel().put(
                    agent->group().peer(to),
                    {std::move(group), epoch, std::move(tag)},
                    {std::move(tensors), isSingle},
                    timeoutOf(*agent, timeout)));
          },
          py::arg("group"),
          py::arg("epoch"),
          py::arg("to"),
          py::arg("tag"),
          py::arg("tensors"),
          py::arg("is_single"),
          py::arg("timeout"),
          NoGil())
      .def(
          "post",
          [](const ChannelOfAgent& self,
             std::string group,
             uint64_t epoch,
             const std::string& source,
             std::string tag,
             std::optional<std::vector<at::Tensor>> into,
             bool /*isSingle*/) {
            const std::shared_ptr<UcxRpcAgent> agent = self.agent();
            return std::make_unique<PostedValue>(
                self.agent,
                agent->channel().post(
                    agent->group().peer(source), {std::move(group), epoch, std::move(tag)}, std::move(into)));
          },
          py::arg("group"),
          py::arg("epoch"),
          py::arg("source"),
          py::arg("tag"),
          py::arg("into"),
          py::arg("is_single"),
          NoGil());
  module.def(
      "channel_of",
      [](const std::shared_ptr<UcxRpcAgent>& agent) { return ChannelOfAgent{AgentOfValue(agent)}; },
      py::arg("agent"));
}

} // namespace torch_ucx_rpc
