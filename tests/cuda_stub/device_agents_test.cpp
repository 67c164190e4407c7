// Agents of two processes send tensors over UCX, with the driver of cuda_stub.h. The streams are the fake device's, and
// the memory is the stub's. So UCX uses the same protocols as with a GPU, and the driver counts the calls.
// device_lanes_test.cpp tests UCX without the agent.

#include "cuda_stub.h"
#include "stub_process.h"

#include "base/proc.h"
#include "device_fixture.h"
#include "memory/device_pool.h"
#include "transport/ucp/ucp_transport.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr int kCalls = 4;
constexpr float kTimeoutSeconds = 60;

// ----------------------------------------------------------------------------------------- in one of the two processes

// An allocator beside torch's, like RMM's over cudaMallocAsync.
struct OtherAllocator {
  static void* allocate(size_t bytes, int /*device*/, void* /*stream*/) {
    return allocateOnDevice(DeviceMemory::kPool, bytes);
  }
  static void deallocate(void* data, size_t /*bytes*/, int /*device*/, void* /*stream*/) {
    freeOnDevice(static_cast<std::byte*>(data));
  }
};

// A worker of a job of two. Its devices' streams run all the time.
class Worker {
 public:
  Worker(worker_id_t rank, const Socket& other, const Handler& handler, DeviceMemory memory) : rank_(rank) {
    useTheDevice(); // before UCX starts, as init_rpc does
    FakeDevice::instance().takeMemoryFrom([memory](size_t bytes) {
      return FakeDevice::Memory(allocateOnDevice(memory, std::max<size_t>(bytes, 1)), &freeOnDevice);
    });
    // As with CUDA, no event is done at once.
    FakeDevice::instance().completeEventsLater(true);
    agent_ = std::make_shared<UcxRpcAgent>(
        nameOf(rank),
        rank,
        makeUcpTransport(2),
        std::make_unique<Callback>(handler),
        ThreadHooks{},
        [] {},
        AgentOptions{});
    const Member self = memberOf(rank, getpid(), agent_->session(), agent_->address());
    other.tell(std::to_string(self.pid));
    other.tell(std::to_string(self.session));
    other.tell(self.address);
    const pid_t pid = std::stoi(other.hear());
    const uint64_t session = std::stoull(other.hear());
    const Member peer = memberOf(otherRank(), pid, session, other.hear());
    agent_->group().addMembers(rank == 0 ? std::vector{self, peer} : std::vector{peer, self});
    agent_->start();
    running_ = std::jthread([](const std::stop_token& isOver) {
      while (!isOver.stop_requested()) {
        FakeDevice::instance().run();
        std::this_thread::sleep_for(std::chrono::microseconds(100)); // a real device is not faster
      }
    });
  }

  // Sets the devices of the other worker on which tensors of this worker's requests and answers arrive.
  void setDeviceMaps(const DeviceMap& requests, const DeviceMap& answers) const {
    const std::string other = nameOf(otherRank());
    agent_->deviceMaps().set({{other, requests}}, {{other, answers}}, {fake()});
  }

  Future call(std::vector<at::Tensor> tensors) const {
    return agent_->send(
        agent_->getWorkerInfo(otherRank()),
        makeMessage(MessageType::PYTHON_CALL, "", std::move(tensors)),
        kTimeoutSeconds,
        {});
  }

  void report() const {
    for (const auto& [name, value] : agent_->getDebugInfo()) {
      if (name.starts_with("lanes.")) {
        std::cout << "lanes: " << value << std::endl;
      }
    }
    std::cout << "staged=" << agent_->getMetrics().at("device_pool.staged_bytes") << std::endl;
  }

  void shutdown() {
    agent_->shutdown();
    running_ = {};
  }

 private:
  static std::string nameOf(worker_id_t rank) {
    return "w" + std::to_string(rank);
  }
  worker_id_t otherRank() const {
    return static_cast<worker_id_t>(1 - rank_);
  }
  static Member memberOf(worker_id_t rank, pid_t pid, uint64_t session, const std::string& address) {
    Member member;
    member.rank = rank;
    member.name = nameOf(rank);
    member.host = "host";
    member.pid = pid;
    member.bootId = "one machine";
    member.processStartTime = readProcStat("/proc/" + std::to_string(pid)).value().startTicks;
    member.session = session;
    member.address = address;
    return member;
  }

  const worker_id_t rank_;
  std::shared_ptr<UcxRpcAgent> agent_;
  std::jthread running_;
};

uint64_t bytesOfPool() {
  return DevicePool::instance().statistics().inUseBytes;
}

// Returns whether the tensor gets this value when its stream comes to it.
bool becomesAll(const at::Tensor& tensor, double value) {
  if (tensor.is_cpu()) {
    return isAll(tensor, value);
  }
  const Look look(tensor);
  return eventually([&] { return look.hasSeen(value); });
}

// Makes a tensor on its device's stream, which comes to it later.
at::Tensor madeOn(c10::Device device, int64_t elements, double value) {
  at::Tensor tensor = at::empty({elements}, at::TensorOptions(device).dtype(at::kFloat));
  if (device.is_cpu()) {
    return tensor.fill_(value);
  }
  FakeDevice::instance().launch(device, [view = hostView(tensor), value] { view.fill_(value); });
  return tensor;
}

// ------------------------------------------------------------------------------------------------ of the two processes

struct Job {
  Environment environment;
  DeviceMemory memory = DeviceMemory::kPlain;
  DeviceMap requests{{fake(), fake()}};
  DeviceMap answers{{fake(), fake()}};
  std::function<void()> setUp = [] {}; // each process calls it
};

// Runs a caller that does `act`, and a callee with the handler. Both write the number of calls of each driver function.
std::unique_ptr<TwoProcesses> play(
    const Job& job, const Handler& handler, const std::function<void(const Worker& caller)>& act) {
  return std::make_unique<TwoProcesses>(
      job.environment,
      [&](const Socket& other) {
        job.setUp();
        Worker worker(0, other, &echo, job.memory);
        worker.setDeviceMaps(job.requests, job.answers);
        (void)other.hear();
        // Connects both before they allocate: on this driver UCX's cache would miss earlier allocations.
        (void)answer(worker.call({}));
        counted([&] { act(worker); });
        worker.report();
        other.tell("over");
        (void)other.hear();
        worker.shutdown();
      },
      [&](const Socket& other) {
        job.setUp();
        Worker worker(1, other, handler, job.memory);
        worker.setDeviceMaps(job.requests, job.answers);
        counted([&] {
          other.tell("ready");
          (void)other.hear();
        });
        worker.report();
        other.tell("over");
        worker.shutdown();
      });
}

// Calls an echo with tensors on a device, one call after the other.
std::unique_ptr<TwoProcesses> callEcho(const Job& job, c10::Device device, uint64_t bytes) {
  return play(job, &echo, [=](const Worker& caller) {
    for (int number = 1; number <= kCalls; ++number) {
      const Future future = caller.call({madeOn(device, static_cast<int64_t>(bytes / sizeof(float)), number)});
      (void)answer(future);
      future->wait();
      const at::Tensor back = future->value().toCustomClass<Message>()->tensors().at(0);
      require(back.device() == device, "the answer is elsewhere");
      require(becomesAll(back, number), "the answer is another tensor");
    }
  });
}

// UCX must not copy these tensors in pieces through the host's memory: it would wait for each piece under the worker
// lock.
void expectNoPieces(TwoProcesses& job) {
  EXPECT_EQ(job.count("cuMemcpyAsync"), 0u);
  EXPECT_EQ(job.count("cuStreamSynchronize"), 0u);
  EXPECT_EQ(job.count("blocked_us"), 0u);
}

const std::vector<uint64_t> kSizes{4 * kKiB, kMiB, 64 * kMiB};

TEST(DeviceAgents, UcxCopiesEachTensorOnceBetweenDevices) {
  for (const uint64_t bytes : kSizes) {
    const auto job = callEcho({}, fake(), bytes);
    ASSERT_TRUE(job->haveSucceeded());
    EXPECT_TRUE(job->first->hasWritten("cuda_ipc")) << job->first->written();
    EXPECT_EQ(job->count("cuMemcpyDtoDAsync_v2"), 2u * kCalls) << bytes;
    EXPECT_EQ(job->count("staged"), 0u);
    expectNoPieces(*job);
  }
}

TEST(DeviceAgents, UcxIsGivenNoMemoryOfADeviceOnOneSideOnly) {
  for (const uint64_t bytes : kSizes) {
    for (const c10::Device device : {c10::Device(c10::kCPU), fake()}) {
      const c10::Device other = device.is_cpu() ? fake() : c10::Device(c10::kCPU);
      const auto job = callEcho({{}, DeviceMemory::kPlain, {{device, other}}, {{other, device}}}, device, bytes);
      ASSERT_TRUE(job->haveSucceeded());
      EXPECT_EQ(job->count("cuMemcpyDtoDAsync_v2"), 0u) << bytes;
      EXPECT_EQ(job->count("staged"), 0u) << "the map says so, and nothing is amiss";
      expectNoPieces(*job);
    }
  }
}

TEST(DeviceAgents, UnshareableMemoryIsStaged) {
  const std::vector<Job> jobs{{{{"UCX_TLS", "^cuda_ipc"}}}, {{}, DeviceMemory::kPool}, {{}, DeviceMemory::kVirtual}};
  for (const Job& unshared : jobs) {
    const auto job = callEcho(unshared, fake(), 8 * kMiB);
    ASSERT_TRUE(job->haveSucceeded());
    EXPECT_EQ(job->count("cuMemcpyDtoDAsync_v2"), 0u);
    EXPECT_EQ(job->count("staged"), 2u * kCalls * 8 * kMiB);
    expectNoPieces(*job);
  }
}

// RMM's memory resource may be an allocator whose memory UCX cannot share. Then tensors arrive in torch's memory, and
// are copied on the device.
TEST(DeviceAgents, ArrivalInMemoryUcxCannotShareIsCopiedOnTheDevice) {
  Job rmm;
  rmm.setUp = [] {
    DevicePool::instance().setSource(
        DevicePool::Source::kEntryPoints, {&OtherAllocator::allocate, &OtherAllocator::deallocate});
  };
  const auto job = play(rmm, &echo, [](const Worker& caller) {
    for (int number = 1; number <= kCalls; ++number) {
      const Future future = caller.call({madeOn(fake(), kLarge, number)});
      (void)answer(future);
      future->wait();
      const at::Tensor back = future->value().toCustomClass<Message>()->tensors().at(0);
      require(bytesOfPool() >= back.nbytes(), "the answer is not in the pool's memory");
      require(becomesAll(back, number), "the answer is another tensor");
    }
  });
  ASSERT_TRUE(job->haveSucceeded());
  EXPECT_EQ(job->count("cuMemcpyDtoDAsync_v2"), 1u * kCalls) << "the requests";
  EXPECT_EQ(job->count("staged"), kCalls * kLarge * sizeof(float)) << "the answers, which are in such memory";
  expectNoPieces(*job);
}

// The driver's copies and events are late, and so are the kernels that make the tensors in the caller and in the
// handler. No memory may be reused before UCX has read or written it, and no reader may be too early.
TEST(DeviceAgents, OrderHoldsHoweverLateTheDeviceIs) {
  for (const char* nvlinks : {"0", "18"}) { // UCX writes, or reads
    const Job late{{{"CUDA_STUB_COPY_US", "20000"}, {"CUDA_STUB_EVENT_US", "20000"}, {"CUDA_STUB_NVLINKS", nvlinks}}};
    const Handler addOne = [](Message& request) {
      if (request.tensors().empty()) {
        return completed("");
      }
      const at::Tensor made = at::empty({kLarge}, at::TensorOptions(fake()).dtype(at::kFloat));
      FakeDevice::instance().launch(
          fake(), [from = hostView(request.tensors()[0]), to = hostView(made)] { to.copy_(from).add_(1); });
      Future future = c10::make_intrusive<JitFuture>(at::AnyClassType::get(), Devices{fake()});
      complete(future, "", {made});
      return future;
    };
    const auto job = play(late, addOne, [](const Worker& caller) {
      std::vector<Future> futures;
      for (int number = 1; number <= kCalls; ++number) {
        futures.push_back(caller.call({madeOn(fake(), kLarge, number)}));
        (void)madeOn(fake(), kLarge, -1); // overwrites memory that has been freed too early
      }
      for (int number = 1; number <= kCalls; ++number) {
        const Future& future = futures[static_cast<size_t>(number) - 1];
        (void)answer(future);
        future->wait();
        require(
            becomesAll(future->value().toCustomClass<Message>()->tensors().at(0), number + 1),
            "the answer was read or written out of order");
      }
    });
    ASSERT_TRUE(job->haveSucceeded());
    EXPECT_EQ(job->count("cuMemcpyDtoDAsync_v2"), 2u * kCalls);
    expectNoPieces(*job);
  }
}

} // namespace
} // namespace torch_ucx_rpc
