// What UCX does with device memory, between two processes and with the driver of cuda_stub.h: which lanes and protocols
// it chooses, what it asks the driver, and that bytes arrive. The driver has no GPU: nothing here says how fast
// anything is.

#include "cuda_stub.h"

#include "transport/ucp/device_sharing.h"
#include "transport/ucp/ucp_library.h"
#include "transport/ucp/ucp_transport.h"
#include "wire/header.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" { // cuda.h, as far as a program needs it that has device memory
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxPushCurrent_v2(void* context);
int cuMemAlloc_v2(uint64_t* at, size_t bytes);
int cuMemAllocAsync(uint64_t* at, size_t bytes, void* stream);
int cuMemAddressReserve(uint64_t* at, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags);
int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
}

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
// UCX is asked to wake whoever waits; a wake-up that takes this long is lost.
constexpr int kLostMs = 5000;

// What the program may have for a message.
enum class Kind {
  kHost,
  kDevice, // of cudaMalloc, hence of torch
  kDevicePool, // of cudaMallocAsync
  kDeviceVirtual, // of torch's expandable_segments
};

// ----------------------------------------------------------------------------------------- in one of the two processes

[[noreturn]] void fail(const std::string& why) {
  std::cout << "failed: " << why << std::endl;
  _exit(1);
}

void require(bool holds, const std::string& what) {
  if (!holds) {
    fail(what);
  }
}

struct Buffer {
  Buffer(Kind kind, uint64_t bytes) : bytes(bytes), memory(kind == Kind::kHost ? Memory::kHost : Memory::kDevice) {
    if (kind == Kind::kHost) {
      host.resize(bytes);
      data = host.data();
      return;
    }
    uint64_t at = 0;
    switch (kind) {
      case Kind::kDevicePool:
        require(cuMemAllocAsync(&at, bytes, nullptr) == 0, "no device memory");
        break;
      case Kind::kDeviceVirtual:
        require(cuMemAddressReserve(&at, bytes, 0, 0, 0) == 0 && cuMemMap(at, bytes, 0, 0, 0) == 0, "no device memory");
        break;
      default:
        require(cuMemAlloc_v2(&at, bytes) == 0, "no device memory");
    }
    data = reinterpret_cast<std::byte*>(at);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void fill(int number) {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      const uint64_t word = at * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(number);
      std::memcpy(data + at, &word, sizeof(word));
    }
  }
  bool isFilledWith(int number) const {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, data + at, sizeof(word));
      if (word != at * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(number)) {
        return false;
      }
    }
    return true;
  }

  uint64_t bytes;
  Memory memory;
  std::vector<std::byte> host;
  std::byte* data = nullptr;
};

// One end of the connection.
class End final : public TransportListener {
 public:
  explicit End(int socket) : transport(makeUcpTransport(2)), socket_(socket) {
    header_.index = 0;
    transport->setListener(this);
    tell(transport->address());
    const std::string address = hear();
    if (Error error = transport->connect(address, endpoint)) {
      fail(error.message());
    }
  }

  // Between the processes, beside UCX.
  void tell(const std::string& what) const {
    require(send(socket_, what.data(), what.size(), 0) == static_cast<ssize_t>(what.size()), "the other is gone");
  }
  std::string hear() const {
    std::string heard(64 * kKiB, '\0');
    const ssize_t bytes = recv(socket_, heard.data(), heard.size(), 0);
    require(bytes > 0, "the other is gone");
    heard.resize(static_cast<size_t>(bytes));
    return heard;
  }
  bool hasHeard() const {
    pollfd event{socket_, POLLIN, 0};
    return poll(&event, 1, 0) == 1;
  }

  // Drives, and sleeps as UCX tells where there is nothing to do.
  void driveUntil(const std::function<bool()>& isDone) {
    while (!isDone()) {
      if (transport->progress() != 0 || isDone() || !transport->arm()) {
        continue;
      }
      std::array<pollfd, 2> events{pollfd{transport->eventFd(), POLLIN, 0}, pollfd{socket_, POLLIN, 0}};
      const int ready = poll(events.data(), events.size(), kLostMs);
      require(
          ready > 0,
          "nobody has woken this process up: " + std::to_string(transport->operationsInFlight()) + " under way");
    }
  }

  void sendFrom(const Buffer& buffer) {
    const Error error = trySending(buffer);
    require(!error, error.message());
  }
  Error trySending(const Buffer& buffer) {
    beginSending(buffer);
    driveUntil([&] { return isSent(); });
    return *sent_;
  }
  void beginSending(const Buffer& buffer) {
    sent_.reset();
    transport->send(
        endpoint,
        header_,
        {buffer.data, buffer.bytes},
        SendMode::kRendezvous,
        [this](Error error) { sent_ = std::move(error); },
        buffer.memory);
  }
  bool isSent() const {
    return sent_.has_value();
  }

  void receiveInto(const Buffer& buffer) {
    const Error error = tryReceiving(buffer);
    require(!error, error.message());
  }
  Error tryReceiving(const Buffer& buffer) {
    driveUntil([&] { return rendezvous_ != nullptr; });
    std::optional<Error> outcome;
    transport->receive(
        std::exchange(rendezvous_, nullptr),
        buffer.data,
        buffer.bytes,
        [&](Error error) { outcome = std::move(error); },
        buffer.memory);
    driveUntil([&] { return outcome.has_value(); });
    return *outcome;
  }

  // TransportListener.
  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {}
  void onRendezvous(std::span<const std::byte> /*header*/, void* rendezvous, uint64_t /*bytes*/) override {
    rendezvous_ = rendezvous;
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& error) override {
    require(mayFail, "the endpoint has failed: " + error.message());
  }

  bool mayFail = false;
  std::unique_ptr<Transport> transport;
  EndpointId endpoint = 0;

 private:
  const int socket_;
  wire::Header header_;
  std::optional<Error> sent_; // how it ended
  void* rendezvous_ = nullptr;
};

// UCX's CUDA transports are linked against both libraries of the driver; this program is linked against libcuda.so.1.
void useTheDevice() {
  require(dlopen(CUDA_STUB_NVML, RTLD_NOW | RTLD_GLOBAL) != nullptr, "no libnvidia-ml.so.1");
  void* context = nullptr;
  require(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxPushCurrent_v2(context) == 0, "no CUDA");
}

// ------------------------------------------------------------------------------------------------ of the two processes

using Body = std::function<void()>;
using Environment = std::map<std::string, std::string>;

// A process that a test has started, and what it has written.
class Process {
 public:
  Process(const Environment& environment, const Body& body) {
    std::cout.flush();
    id_ = fork();
    if (id_ == 0) {
      dup2(fileno(output_), STDOUT_FILENO);
      dup2(fileno(output_), STDERR_FILENO);
      setvbuf(stdout, nullptr, _IONBF, 0);
      for (const auto& [name, value] : environment) {
        setenv(name.c_str(), value.c_str(), 1);
      }
      body();
      std::exit(0);
    }
  }
  ~Process() {
    std::fclose(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Waits for its end; what it has written.
  const std::string& written() {
    if (id_ != 0) {
      waitpid(std::exchange(id_, 0), &status_, 0);
      std::rewind(output_);
      std::array<char, 4096> some{};
      for (size_t bytes = 0; (bytes = std::fread(some.data(), 1, some.size(), output_)) != 0;) {
        written_.append(some.data(), bytes);
      }
    }
    return written_;
  }
  bool hasSucceeded() {
    (void)written();
    return status_ == 0;
  }
  bool hasWritten(const std::string& text) {
    return written().find(text) != std::string::npos;
  }
  // Of the lines "name=number".
  uint64_t count(const std::string& name) {
    std::istringstream lines(written());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(name + "=")) {
        return std::stoull(line.substr(name.size() + 1));
      }
    }
    ADD_FAILURE() << name << " has not been counted";
    return 0;
  }

 private:
  std::FILE* const output_ = std::tmpfile();
  pid_t id_ = 0;
  int status_ = 0;
  std::string written_;
};

// Two connected processes: one sends, the other receives.
class Pair {
 public:
  using Role = std::function<void(End&)>;

  Pair(const Environment& environment, const Role& send, const Role& receive) {
    std::array<int, 2> sockets{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets.data()), 0);
    const auto process = [&](size_t index, const Role& role) {
      return std::make_unique<Process>(environment, [&sockets, index, role] {
        close(sockets[1 - index]);
        play(sockets[index], role);
      });
    };
    sender = process(0, send);
    receiver = process(1, receive);
    for (const int socket : sockets) {
      close(socket);
    }
  }

  bool haveSucceeded() {
    EXPECT_TRUE(sender->hasSucceeded()) << sender->written();
    EXPECT_TRUE(receiver->hasSucceeded()) << receiver->written();
    return sender->hasSucceeded() && receiver->hasSucceeded();
  }
  uint64_t count(const std::string& name) {
    return sender->count(name) + receiver->count(name);
  }

  std::unique_ptr<Process> sender;
  std::unique_ptr<Process> receiver;

 private:
  // In the new process.
  static void play(int socket, const Role& role) {
    useTheDevice();
    const auto act = [socket, &role] {
      End end(socket);
      role(end);
      end.tell("over");
      end.driveUntil([&] { return end.hasHeard(); });
      end.transport->close(1000);
    };
    if (std::getenv("DRIVER_WITHOUT_CONTEXT") == nullptr) {
      act();
    } else {
      std::thread(act).join();
    }
  }
};

constexpr std::array<const char*, 7> kCounted{
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamSynchronize",
    "cuEventQuery",
    "cuEventRecord",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2"};

// Writes how often the driver was called meanwhile.
template <typename Action>
void counted(const Action& action) {
  std::map<std::string, uint64_t> before;
  for (const char* function : kCounted) {
    before[function] = cudaStubCalls(function);
  }
  action();
  for (const char* function : kCounted) {
    std::cout << function << "=" << cudaStubCalls(function) - before[function] << std::endl;
  }
}

// One message, whose calls of the driver are counted, after another one that has made the connection and mapped the
// memory.
std::unique_ptr<Pair> exchange(Kind from, Kind to, uint64_t bytes, Environment environment = {}) {
  environment.emplace("UCX_PROTO_INFO", "y"); // writes which protocols are chosen
  return std::make_unique<Pair>(
      environment,
      [&](End& end) {
        Buffer buffer(from, bytes);
        buffer.fill(1);
        end.sendFrom(buffer);
        (void)end.hear();
        buffer.fill(2);
        counted([&] { end.sendFrom(buffer); });
        for (const std::string& lane : end.transport->lanes(end.endpoint)) {
          std::cout << "lane " << lane << std::endl;
        }
      },
      [&](End& end) {
        Buffer buffer(to, bytes);
        end.receiveInto(buffer);
        require(buffer.isFilledWith(1), "the first message has not come as it was sent");
        end.tell("next");
        counted([&] { end.receiveInto(buffer); });
        require(buffer.isFilledWith(2), "the message has not come as it was sent");
      });
}

// What UCX does with a message of 8 MiB where it copies through the host's shared memory, in pieces of 8 KiB: it waits
// for the device after each, with the worker lock held.
constexpr uint64_t kStaged = 8 * kMiB;
constexpr uint64_t kPieces = kStaged / (9 * kKiB);

// ------------------------------------------------------------------------------------------------- lanes and protocols

TEST(DeviceLanes, BetweenDevicesEachMessageIsOneCopyByTheSender) {
  for (const uint64_t bytes : {4 * kKiB, kMiB, 64 * kMiB}) {
    const auto pair = exchange(Kind::kDevice, Kind::kDevice, bytes);
    ASSERT_TRUE(pair->haveSucceeded());
    EXPECT_TRUE(pair->sender->hasWritten("lane cuda_ipc/cuda"));
    EXPECT_TRUE(pair->sender->hasWritten("zero-copy flushed write to remote | cuda_ipc/cuda"))
        << pair->sender->written();
    EXPECT_EQ(pair->sender->count("cuMemcpyDtoDAsync_v2"), 1u);
    EXPECT_EQ(pair->receiver->count("cuMemcpyDtoDAsync_v2"), 0u);
    EXPECT_EQ(pair->count("cuMemcpyAsync"), 0u);
    EXPECT_EQ(pair->count("cuStreamSynchronize"), 0u);
    EXPECT_EQ(pair->count("cuIpcOpenMemHandle_v2"), 0u) << "the memory is mapped anew for each message";
  }
}

TEST(DeviceLanes, WithNvlinksTheReceiverCopies) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"CUDA_STUB_NVLINKS", "18"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_TRUE(pair->receiver->hasWritten("zero-copy read from remote | cuda_ipc/cuda")) << pair->receiver->written();
  EXPECT_EQ(pair->sender->count("cuMemcpyDtoDAsync_v2"), 0u);
  EXPECT_EQ(pair->receiver->count("cuMemcpyDtoDAsync_v2"), 1u);
  EXPECT_EQ(pair->count("cuStreamSynchronize"), 0u);
}

TEST(DeviceLanes, WithoutUcxsCacheOfMemoryTypesNothingChanges) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"UCX_MEMTYPE_CACHE", "n"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 1u);
  EXPECT_EQ(pair->count("cuMemcpyAsync"), 0u);
}

// Threads that drive progress need not have CUDA's context current: UCX 1.22 pushes it where it needs one.
TEST(DeviceLanes, ThreadsNeedNoContext) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"DRIVER_WITHOUT_CONTEXT", "y"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 1u);
}

// Endpoints that report dead peers have no pipelines in UCX (RNDV_PIPELINE_ERROR_HANDLING=n). So it must be given no
// message that is in a device's memory on one side only: such are staged by the agent.
TEST(DeviceLanes, BetweenADeviceAndTheHostUcxCopiesInPieces) {
  const auto fromDevice = exchange(Kind::kDevice, Kind::kHost, kStaged);
  ASSERT_TRUE(fromDevice->haveSucceeded());
  EXPECT_GT(fromDevice->sender->count("cuMemcpyAsync"), kPieces);
  EXPECT_EQ(fromDevice->sender->count("cuStreamSynchronize"), fromDevice->sender->count("cuMemcpyAsync"));
  const auto toDevice = exchange(Kind::kHost, Kind::kDevice, kStaged);
  ASSERT_TRUE(toDevice->haveSucceeded());
  EXPECT_GT(toDevice->receiver->count("cuMemcpyAsync"), kPieces);
  EXPECT_EQ(toDevice->receiver->count("cuStreamSynchronize"), toDevice->receiver->count("cuMemcpyAsync"));
}

// ----------------------------------------------------------------------------------------------- what cannot be shared

TEST(DeviceLanes, WithoutCudaIpcUcxCopiesInPiecesOnBothSides) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kStaged, {{"UCX_TLS", "^cuda_ipc"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_FALSE(pair->sender->hasWritten("lane cuda_ipc"));
  EXPECT_GT(pair->sender->count("cuMemcpyAsync"), kPieces);
  EXPECT_GT(pair->receiver->count("cuMemcpyAsync"), kPieces);
}

TEST(DeviceLanes, MemoryThatCannotBeSharedArrivesInPieces) {
  for (const Kind kind : {Kind::kDevicePool, Kind::kDeviceVirtual}) {
    const auto pair = exchange(kind, Kind::kDevice, kStaged);
    ASSERT_TRUE(pair->haveSucceeded());
    EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 0u);
    EXPECT_GT(pair->sender->count("cuMemcpyAsync"), kPieces);
  }
}

// As between containers that share no PID namespace.
TEST(DeviceLanes, HandlesThatCannotBeOpenedAreDoneWithout) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"CUDA_STUB_IPC", "n"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 0u);
}

TEST(DeviceSharing, IsWhatUcxCanDo) {
  Process process({}, [] {
    useTheDevice();
    const Buffer device(Kind::kDevice, kMiB);
    const Buffer pool(Kind::kDevicePool, kMiB);
    const Buffer chunks(Kind::kDeviceVirtual, 8 * kMiB);
    const Buffer host(Kind::kHost, kMiB);
    require(canShareDeviceMemory(device.data, 1), "the beginning of cudaMalloc's memory");
    require(canShareDeviceMemory(device.data, device.bytes), "all of it");
    require(canShareDeviceMemory(device.data + kKiB, device.bytes - kKiB), "its end");
    require(!canShareDeviceMemory(device.data + kKiB, device.bytes), "more than there is");
    require(!canShareDeviceMemory(pool.data, pool.bytes), "cudaMallocAsync's");
    require(!canShareDeviceMemory(chunks.data, chunks.bytes), "expandable_segments'");
    require(canShareDeviceMemory(host.data, host.bytes), "of which the driver knows nothing");
  });
  EXPECT_TRUE(process.hasSucceeded()) << process.written();
}

TEST(DeviceSharing, OfATransportNeedsTheWholeRangeAndCudaIpc) {
  const auto ask = [] {
    useTheDevice();
    const auto transport = makeUcpTransport(2);
    const Buffer device(Kind::kDevice, kMiB);
    const Buffer chunks(Kind::kDeviceVirtual, 8 * kMiB);
    std::cout << "all=" << transport->canShare(device.data, device.bytes)
              << "\nmore=" << transport->canShare(device.data, device.bytes + 1)
              << "\nchunks=" << transport->canShare(chunks.data, chunks.bytes) << std::endl;
  };
  Process usual({}, ask);
  EXPECT_EQ(usual.count("all"), 1u) << usual.written();
  EXPECT_EQ(usual.count("more"), 0u);
  EXPECT_EQ(usual.count("chunks"), 0u);
  Process excluding({{"UCX_TLS", "^cuda_ipc"}}, ask);
  EXPECT_EQ(excluding.count("all"), 0u) << excluding.written();
}

// --------------------------------------------------------------------------------------------- UCX and the driver

void sayWhatUcxCan() {
  const ucp_context_h context = startUcx(2, {});
  std::cout << "cuda_ipc: " << hasCudaIpc(context) << "\nrefused: " << deviceMemoryRefusal(context).message() << "."
            << std::endl;
  ucp_cleanup(context);
}

TEST(DeviceMemoryRefusal, IsNoneWhereUcxHasFoundTheDriver) {
  Process process({}, [] {
    useTheDevice();
    sayWhatUcxCan();
  });
  EXPECT_TRUE(process.hasWritten("cuda_ipc: 1")) << process.written();
  EXPECT_TRUE(process.hasWritten("refused: ."));
  Process excluding({{"UCX_TLS", "^cuda_ipc"}}, [] {
    useTheDevice();
    sayWhatUcxCan();
  });
  EXPECT_TRUE(excluding.hasWritten("cuda_ipc: 0")) << excluding.written();
  EXPECT_TRUE(excluding.hasWritten("refused: ."));
}

TEST(DeviceMemoryRefusal, NamesTheLibraryThatIsMissing) {
  if (dlopen("libnvidia-ml.so.1", RTLD_LAZY) != nullptr) {
    GTEST_SKIP() << "this machine has it";
  }
  Process process({}, [] { // with libcuda.so.1
    require(cuInit(0) == 0, "no CUDA");
    sayWhatUcxCan();
  });
  EXPECT_TRUE(process.hasWritten("cuda_ipc: 0")) << process.written();
  EXPECT_TRUE(process.hasWritten("has started without CUDA")) << process.written();
  EXPECT_TRUE(process.hasWritten("libnvidia-ml.so.1"));
}

TEST(DeviceMemoryRefusal, NamesTheVariableThatExcludesCuda) {
  Process process({{"UCX_TLS", "tcp,sysv,self"}}, [] {
    useTheDevice();
    sayWhatUcxCan();
  });
  EXPECT_TRUE(process.hasWritten("has started without CUDA")) << process.written();
  EXPECT_TRUE(process.hasWritten("UCX_TLS must not exclude cuda_copy"));
}

// UCX would take it for the host's memory, and end the process.
TEST(DeviceMemoryRefusal, IsWhatSendsAndReceivesEndWith) {
  const auto failing = [](End& end, Buffer& buffer, bool isSender) {
    const Error why = isSender ? end.trySending(buffer) : end.tryReceiving(buffer);
    std::cout << "failed=" << (why.code() == ErrorCode::kDeviceFailed) << "\n" << why.message() << std::endl;
  };
  Pair pair(
      {{"UCX_TLS", "tcp,sysv,self"}},
      [&](End& end) {
        Buffer device(Kind::kDevice, kMiB);
        failing(end, device, true);
        end.sendFrom(Buffer(Kind::kHost, kMiB));
      },
      [&](End& end) {
        Buffer device(Kind::kDevice, kMiB);
        failing(end, device, false);
      });
  ASSERT_TRUE(pair.haveSucceeded());
  for (Process* process : {pair.sender.get(), pair.receiver.get()}) {
    EXPECT_EQ(process->count("failed"), 1u) << process->written();
    EXPECT_TRUE(process->hasWritten("has started without CUDA"));
  }
}

// ------------------------------------------------------------------------------------------------------ waiting, dying

// Nobody asks the device again and again: UCX has it wake the thread that sleeps.
TEST(DeviceLanes, WhoSleepsIsWokenWhenTheDeviceIsDone) {
  for (const char* nvlinks : {"0", "18"}) {
    const auto pair = exchange(
        Kind::kDevice, Kind::kDevice, kMiB, {{"CUDA_STUB_EVENT_US", "100000"}, {"CUDA_STUB_NVLINKS", nvlinks}});
    ASSERT_TRUE(pair->haveSucceeded());
    EXPECT_LT(pair->count("cuEventQuery"), 50u);
  }
}

TEST(DeviceLanes, ASendIsOverWhenItsReceiverHasDied) {
  Pair pair(
      {{"UCX_KEEPALIVE_INTERVAL", "100ms"}},
      [](End& end) {
        end.mayFail = true;
        const Buffer buffer(Kind::kDevice, kMiB);
        end.sendFrom(buffer);
        const pid_t receiver = std::stoi(end.hear());
        cudaStubHold(true);
        const uint64_t copies = cudaStubCalls("cuMemcpyDtoDAsync_v2");
        end.beginSending(buffer);
        end.driveUntil([&] { return cudaStubCalls("cuMemcpyDtoDAsync_v2") != copies; });
        kill(receiver, SIGKILL);
        cudaStubHold(false);
        end.driveUntil([&] { return end.isSent(); });
        end.transport->close(100);
        std::cout << "the send is over" << std::endl;
        _exit(0);
      },
      [](End& end) {
        const Buffer buffer(Kind::kDevice, kMiB);
        end.receiveInto(buffer);
        end.tell(std::to_string(getpid()));
        end.receiveInto(buffer);
        pause();
      });
  EXPECT_TRUE(pair.sender->hasWritten("the send is over")) << pair.sender->written();
  EXPECT_FALSE(pair.receiver->hasSucceeded());
}

} // namespace
} // namespace torch_ucx_rpc
