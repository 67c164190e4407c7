#include "base/time.h"
#include "base/warnings.h"
#include "bindings/bindings.h"
#include "rpc/agent.h"
#include "rpc/faulty_agent.h"
#include "torch_glue/torch_state.h"
#include "transport/ucp/ucp_transport.h"

#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <pybind11/functional.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

// Python's identities of the agent threads that have a thread state. Guarded by the GIL.
std::set<unsigned long>& pythonThreads() {
  static auto* threads = new std::set<unsigned long>(); // NOLINT: threads may outlast static objects
  return *threads;
}

// A Python thread state that lasts as long as the agent thread. PyGILState_Ensure alone would build and tear down one
// for every request. All threads share the hooks, and each has its own state in the variables.
ThreadHooks pythonThreadHooks() {
  static thread_local PyGILState_STATE gilState;
  static thread_local PyThreadState* threadState;
  return {
      [] {
        gilState = PyGILState_Ensure();
        pythonThreads().insert(PyThread_get_thread_ident());
        threadState = PyEval_SaveThread(); // keeps the state, and releases the GIL
      },
      [] {
        if (!isInterpreterFinalizing()) { // else the thread states are gone already
          PyEval_RestoreThread(threadState);
          pythonThreads().erase(PyThread_get_thread_ident());
          PyGILState_Release(gilState);
        }
      }};
}

// Raises SystemExit in the agent threads that are left, as soon as they run Python code again. Forgets the threads that
// Python does not know (it returns 0): a forked child has none of the parent's threads.
void interruptThreads() {
  std::erase_if(
      pythonThreads(), [](unsigned long thread) { return PyThreadState_SetAsyncExc(thread, PyExc_SystemExit) == 0; });
}

// Lets Ctrl-C through while a thread waits without the GIL.
void checkSignals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

const char* nameOf(Peer::State state, bool isResuming) {
  switch (state) {
    case Peer::State::kPresent:
      return isResuming ? "resuming" : "present";
    case Peer::State::kLeaving:
      return "leaving";
    case Peer::State::kLeft:
      return "left";
    case Peer::State::kFailed:
      return "failed";
  }
  return "";
}

void addCounts(py::dict& values, const std::vector<Count>& counts) {
  for (const Count& count : counts) {
    if (*count.name != '\0') { // otherwise only a metric
      values[count.name] = count.value;
    }
  }
}

// The statistics, under the names of the fields in _observe/statistics.py.
py::dict statisticsOf(UcxRpcAgent& agent) {
  agent.checkProcess();
  AgentStatistics statistics{};
  {
    const WithoutGil noGil; // it waits for the worker lock
    statistics = agent.reports().statistics();
  }
  using py::operator""_a;
  py::list peers;
  for (const AgentStatistics::OfPeer& of : statistics.peers) {
    const Member& member = of.peer->member();
    py::dict values(
        "name"_a = member.name,
        "rank"_a = member.rank,
        "host"_a = member.host,
        "pid"_a = member.pid,
        "session"_a = member.session,
        "state"_a = nameOf(of.state, of.peer->isResuming.load()),
        "has_ended"_a = of.peer->hasEnded.load(),
        "lanes"_a = of.lanes,
        "latency_counts"_a = of.latencyCounts,
        "latency_sum_ns"_a = of.latencySum.count());
    addCounts(values, of.counts);
    peers.append(std::move(values));
  }
  py::dict values("peers"_a = peers);
  addCounts(values, statistics.counts);
  return values;
}

// Makes any kind of agent. `own` are the arguments of this kind of agent, which follow the common ones.
template <typename Agent, typename... Own>
std::shared_ptr<Agent> makeAgent(
    std::string name,
    worker_id_t rank,
    const AgentOptions& options,
    size_t expectedPeers,
    const std::string& networkDevices,
    const Own&... own) {
  const WithoutGil noGil;
  return std::make_shared<Agent>(
      std::move(name),
      rank,
      makeUcpTransport(expectedPeers, networkDevices),
      std::make_unique<torch::distributed::rpc::RequestCallbackImpl>(),
      pythonThreadHooks(),
      &checkSignals,
      options,
      own...);
}

std::shared_ptr<UcxRpcAgent> makeUcxAgent(
    std::string name,
    worker_id_t rank,
    const AgentOptions& options,
    size_t expectedPeers,
    const std::string& networkDevices) {
  // Not for a faulty agent, which fails calls before torch has connected them with their RRefs. So only torch can mark
  // those RRefs.
  keepRRefThatTorchMarks();
  return makeAgent<UcxRpcAgent>(std::move(name), rank, options, expectedPeers, networkDevices);
}

std::shared_ptr<FaultyUcxRpcAgent> makeFaultyAgent(
    std::string name,
    worker_id_t rank,
    const AgentOptions& options,
    size_t expectedPeers,
    const std::string& networkDevices,
    std::vector<std::string> messagesToFail,
    const std::map<std::string, double>& messagesToDelay,
    int sendsToFail) {
  Faults faults{std::move(messagesToFail), sendsToFail, {}};
  for (const auto& [type, seconds] : messagesToDelay) {
    faults.messagesToDelay[type] = toMilliseconds(seconds);
  }
  return makeAgent<FaultyUcxRpcAgent>(std::move(name), rank, options, expectedPeers, networkDevices, faults);
}

// `callback(session, name, rank, has_failed, reason, has_ended)` runs on an agent thread for each peer that is gone.
// None removes the callback.
void setOnGone(UcxRpcAgent& agent, const py::object& callback) {
  Group::OnGone onGone;
  if (!callback.is_none()) {
    // The last copy may be destroyed on a thread without the GIL, at any time.
    const std::shared_ptr<py::object> held(new py::object(callback), [](py::object* object) {
      if (isInterpreterFinalizing()) {
        return; // the object goes with the process
      }
      const py::gil_scoped_acquire gil;
      delete object; // NOLINT(cppcoreguidelines-owning-memory)
    });
    onGone = [held](const Peer& peer) {
      Executor::runHooks(); // so that taking the GIL finds the lasting thread state
      const Member& member = peer.member();
      const py::gil_scoped_acquire gil;
      try {
        (*held)(
            member.session,
            member.name,
            member.rank,
            peer.state() == Peer::State::kFailed,
            peer.whyGone().message(),
            peer.hasEnded.load());
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("torch_ucx_rpc: a callback for gone workers");
      }
    };
  }
  const WithoutGil noGil;
  agent.group().setOnGone(std::move(onGone));
}

// Calls takeBackFork() with what PyRRef._serialize() has returned.
void takeBack(const py::tuple& pickledRRef) {
  namespace rpc = torch::distributed::rpc;
  // torch has no function that reads the tuple without making a reference.
  const auto number = [&pickledRRef](size_t index) { return pickledRRef[index].cast<int64_t>(); };
  const auto rank = [&number](size_t index) { return static_cast<rpc::worker_id_t>(number(index)); };
  const rpc::RRefForkData fork(
      rank(0), rpc::RRefId(rank(1), number(2)), rpc::ForkId(rank(3), number(4)), rank(5), /*typeStr=*/"");
  c10::intrusive_ptr<rpc::RRef> freed;
  const WithoutGil noGil;
  freed = takeBackFork(fork);
}

} // namespace

void bindAgents(py::module_& module) {
  module.attr("REQUEST_TYPES") = requestTypeNames();
  module.def("interrupt_threads", &interruptThreads);
  module.def("threads_left", [] { return pythonThreads().size(); });
  module.def("take_back", &takeBack, py::arg("pickled_rref"));
  module.def(
      "devices_of",
      [](const torch::jit::PythonFutureWrapper& future) { return future.fut->devices(); },
      py::arg("future"));

  py::module_::import("torch.distributed.rpc"); // RpcAgent, the base class, and WorkerInfo are bound there

  py::class_<Member>(module, "Member")
      .def(py::init())
      .def_readwrite("rank", &Member::rank)
      .def_readwrite("name", &Member::name)
      .def_readwrite("host", &Member::host)
      .def_readwrite("pid", &Member::pid)
      .def_readwrite("boot_id", &Member::bootId)
      .def_readwrite("pid_namespace", &Member::pidNamespace)
      .def_readwrite("process_start_time", &Member::processStartTime)
      .def_readwrite("user", &Member::user)
      .def_readwrite("session", &Member::session)
      .def_readwrite("first_rref_id", &Member::firstRRefId)
      .def_readwrite("first_context_id", &Member::firstContextId)
      .def_readwrite("address", &Member::address)
      .def_readwrite("lifeline_host", &Member::lifelineHost)
      .def_readwrite("lifeline_port", &Member::lifelinePort)
      .def_readwrite("send_key", &Member::sendKey)
      .def_readwrite("receive_key", &Member::receiveKey)
      .def_readwrite("join_key", &Member::joinKey);

  py::enum_<Waiting>(module, "Waiting")
      .value("auto", Waiting::kAuto)
      .value("poll", Waiting::kPoll)
      .value("sleep", Waiting::kSleep);
  py::class_<AgentOptions>(module, "AgentOptions")
      .def(py::init())
      .def_property(
          "rpc_timeout",
          [](const AgentOptions& options) { return std::chrono::duration<double>(options.rpcTimeout).count(); },
          [](AgentOptions& options, double seconds) { options.rpcTimeout = toMilliseconds(seconds); })
      .def_readwrite("num_worker_threads", &AgentOptions::numWorkerThreads)
      .def_readwrite("max_worker_threads", &AgentOptions::maxWorkerThreads)
      .def_property(
          "heartbeat_limit",
          [](const AgentOptions& options) { return std::chrono::duration<double>(options.heartbeatLimit).count(); },
          [](AgentOptions& options, double seconds) { options.heartbeatLimit = toMilliseconds(seconds); })
      .def_property(
          "reconnect_limit",
          [](const AgentOptions& options) { return std::chrono::duration<double>(options.reconnectLimit).count(); },
          [](AgentOptions& options, double seconds) { options.reconnectLimit = toMilliseconds(seconds); })
      .def_readwrite("receive_window_bytes", &AgentOptions::receiveWindowBytes)
      .def_readwrite("host_pool_bytes", &AgentOptions::hostPoolBytes)
      .def_readwrite("waiting", &AgentOptions::waiting)
      .def_readwrite("stream_priority", &AgentOptions::streamPriority);

  using torch::distributed::rpc::RpcAgent;
  // torch has bound the functions of RpcAgent. NoGil is for functions that may wait for the worker lock, for a peer, or
  // for a thread that waits for the GIL.
  using NoGil = py::call_guard<WithoutGil>;
  py::class_<UcxRpcAgent, RpcAgent, std::shared_ptr<UcxRpcAgent>>(module, "UcxRpcAgent")
      .def(
          py::init(&makeUcxAgent),
          py::arg("name"),
          py::arg("rank"),
          py::kw_only(),
          py::arg("options"),
          py::arg("expected_peers") = 1,
          py::arg("network_devices") = "")
      .def_property_readonly("address", [](const UcxRpcAgent& agent) { return py::bytes(agent.address()); })
      .def_property_readonly("session", &UcxRpcAgent::session)
      .def(
          "_add_members",
          [](UcxRpcAgent& agent, std::vector<Member> members) { agent.group().addMembers(std::move(members)); },
          py::arg("members"),
          NoGil())
      // With the GIL: the functions are Python's, and the agent has not started, so the worker lock is free.
      .def(
          "_set_membership",
          [](UcxRpcAgent& agent,
             std::function<void(const std::string&)> onJoin,
             std::function<void(uint64_t)> onLost,
             const py::bytes& joinKey) {
            agent.group().setMembership({std::move(onJoin), std::move(onLost)}, joinKey);
          },
          py::arg("on_join"),
          py::arg("on_lost"),
          py::arg("join_key"))
      .def(
          "_announce_join",
          [](UcxRpcAgent& agent, const std::string& record, const std::vector<uint64_t>& members) {
            agent.group().announceJoin(record, members);
          },
          py::arg("record"),
          py::arg("members"),
          NoGil())
      .def(
          "_unadmitted", [](UcxRpcAgent& agent) { return agent.group().unadmitted(); }, NoGil())
      .def(
          "_remove_member",
          [](UcxRpcAgent& agent, uint64_t session) { agent.group().removeMember(session); },
          py::arg("session"),
          NoGil())
      .def("_set_on_gone", &setOnGone, py::arg("callback"))
      .def(
          "_set_device_maps",
          [](UcxRpcAgent& agent, DeviceMaps::ByWorker requests, DeviceMaps::ByWorker answers, Devices devices) {
            agent.deviceMaps().set(std::move(requests), std::move(answers), std::move(devices));
          },
          py::arg("device_maps"),
          py::arg("reverse_device_maps"),
          py::arg("devices"),
          NoGil())
      .def(
          "_barrier",
          [](UcxRpcAgent& agent, double timeout) {
            agent.checkProcess();
            return agent.group().barrier(1, toMilliseconds(timeout)).sum;
          },
          py::arg("timeout"),
          NoGil())
      .def(
          "_release_references", [](const UcxRpcAgent& agent) { agent.orphans().releaseReferences(); }, NoGil())
      .def("_check_process", &UcxRpcAgent::checkProcess)
      .def(
          "_wait",
          [](UcxRpcAgent& agent, const torch::jit::PythonFutureWrapper& future) {
            agent.checkProcess();
            agent.calls().waitDriving(*future.fut);
          },
          py::arg("future"),
          NoGil())
      .def(
          "_await",
          [](UcxRpcAgent& agent, const torch::jit::PythonFutureWrapper& future) {
            agent.checkProcess();
            agent.calls().waitIdle(*future.fut);
          },
          py::arg("future"),
          NoGil())
      .def(
          "shutdown",
          [](UcxRpcAgent& agent) {
            agent.checkProcess();
            agent.shutdown();
            flushWarnings(); // the process may end at once
          },
          NoGil())
      .def(
          "get_worker_info",
          [](const UcxRpcAgent& agent) -> const WorkerInfo& { return agent.getWorkerInfo(); },
          py::return_value_policy::copy)
      .def(
          "get_worker_info",
          [](const UcxRpcAgent& agent, const std::string& name) -> const WorkerInfo& {
            return agent.getWorkerInfo(name);
          },
          py::arg("name"),
          py::return_value_policy::copy)
      .def(
          "get_worker_info",
          [](const UcxRpcAgent& agent, worker_id_t id) -> const WorkerInfo& { return agent.getWorkerInfo(id); },
          py::arg("id"),
          py::return_value_policy::copy)
      .def("_statistics", &statisticsOf);

  py::class_<FaultyUcxRpcAgent, UcxRpcAgent, std::shared_ptr<FaultyUcxRpcAgent>>(module, "FaultyUcxRpcAgent")
      .def(
          py::init(&makeFaultyAgent),
          py::arg("name"),
          py::arg("rank"),
          py::kw_only(),
          py::arg("options"),
          py::arg("expected_peers") = 1,
          py::arg("network_devices") = "",
          py::arg("messages_to_fail"),
          py::arg("messages_to_delay"),
          py::arg("num_fail_sends"));
}

} // namespace torch_ucx_rpc
