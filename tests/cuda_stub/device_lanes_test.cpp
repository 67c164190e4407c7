// Tests how UCX uses device memory between two processes, with the driver of cuda_stub.h: its lanes, protocols and
// calls of the driver. Without a GPU nothing here measures speed.

#include "cuda_stub.h"
#include "stub_process.h"

#include "transport/ucp/device_sharing.h"
#include "transport/ucp/ucp_library.h"
#include "transport/ucp/ucp_transport.h"
#include "wire/header.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <csignal>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
// UCX must wake a waiting thread. A wake-up that takes this long counts as lost.
constexpr int kLostMs = 30'000;

// The kinds of memory of a message.
enum class Kind {
  kHost,
  kDevice, // of cudaMalloc, hence of torch
  kDevicePool, // of cudaMallocAsync
  kDeviceVirtual, // of torch's expandable_segments
};

// ----------------------------------------------------------------------------------------- in one of the two processes

struct Buffer {
  Buffer(Kind kind, uint64_t bytes) : bytes(bytes), memory(kind == Kind::kHost ? Memory::kHost : Memory::kDevice) {
    if (kind == Kind::kHost) {
      host.resize(bytes);
      data = host.data();
      return;
    }
    data = allocateOnDevice(
        kind == Kind::kDevicePool          ? DeviceMemory::kPool
            : kind == Kind::kDeviceVirtual ? DeviceMemory::kVirtual
                                           : DeviceMemory::kPlain,
        bytes);
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

// One process's end of the connection.
class End final : public TransportListener {
 public:
  explicit End(const Socket& other) : transport(makeUcpTransport(2)), other_(other) {
    header_.index = 0;
    transport->setListener(this);
    tell(transport->address());
    const std::string address = hear();
    if (Error error = transport->connect(address, endpoint)) {
      fail(error.message());
    }
  }

  // These go between the processes without UCX.
  void tell(const std::string& what) const {
    other_.tell(what);
  }
  std::string hear() const {
    return other_.hear();
  }
  bool hasHeard() const {
    return other_.hasHeard();
  }

  // Drives progress, and sleeps when UCX allows it.
  void driveUntil(const std::function<bool()>& isDone) {
    while (!isDone()) {
      if (transport->progress() != 0 || isDone() || !transport->arm()) {
        continue;
      }
      std::array<pollfd, 2> events{pollfd{transport->eventFd(), POLLIN, 0}, pollfd{other_.fd(), POLLIN, 0}};
      const int ready = poll(events.data(), events.size(), kLostMs);
      require(
          ready > 0,
          "this process was not woken up: " + std::to_string(transport->operationsInFlight()) + " under way");
      require((events[1].revents & POLLHUP) == 0 || mayFail || isDone(), "the other is gone");
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
  const Buffer* earlier = nullptr; // from before UCX's start
  std::unique_ptr<Transport> transport;
  EndpointId endpoint = 0;

 private:
  const Socket other_;
  wire::Header header_;
  std::optional<Error> sent_; // the outcome of the send
  void* rendezvous_ = nullptr;
};

// ------------------------------------------------------------------------------------------------ of the two processes

// Two connected processes: one sends, the other receives.
class Pair {
 public:
  using Role = std::function<void(End&)>;

  Pair(const Environment& environment, const Role& send, const Role& receive)
      : processes_(
            environment,
            [&](const Socket& other) { play(other, send); },
            [&](const Socket& other) { play(other, receive); }),
        sender(processes_.first.get()),
        receiver(processes_.second.get()) {}

  bool haveSucceeded() {
    return processes_.haveSucceeded();
  }
  uint64_t count(const std::string& name) {
    return processes_.count(name);
  }

 private:
  // Runs in the new process.
  static void play(const Socket& other, const Role& role) {
    const bool isUsedLater = std::getenv("DEVICE_USED_LATER") != nullptr;
    if (!isUsedLater) {
      useTheDevice();
    }
    std::optional<Buffer> earlier;
    if (std::getenv("DEVICE_MEMORY_FIRST") != nullptr) {
      earlier.emplace(Kind::kDevice, 4 * kMiB);
    }
    const auto act = [&] {
      End end(other);
      end.earlier = earlier.has_value() ? &*earlier : nullptr;
      if (isUsedLater) {
        useTheDevice();
      }
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

  TwoProcesses processes_;

 public:
  Process* const sender;
  Process* const receiver;
};

// Sends two messages. The first makes the connection and maps the memory. For the second, the calls of the driver are
// counted.
std::unique_ptr<Pair> exchange(Kind from, Kind to, uint64_t bytes, Environment environment = {}) {
  environment.emplace("UCX_PROTO_INFO", "y"); // UCX then writes which protocols it chooses
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

// Expects that a send and a receive of device memory each fail, with `reason` in the error. The host's memory can still
// be sent.
void expectDeviceMemoryIsRefused(const Environment& environment, const std::string& reason) {
  const auto report = [](const Error& why) {
    std::cout << "failed=" << (why.code() == ErrorCode::kDeviceFailed) << "\n" << why.message() << std::endl;
  };
  Pair pair(
      environment,
      [&](End& end) {
        const Buffer device(Kind::kDevice, kMiB);
        report(end.trySending(device));
        end.sendFrom(Buffer(Kind::kHost, kMiB));
      },
      [&](End& end) {
        const Buffer device(Kind::kDevice, kMiB);
        report(end.tryReceiving(device));
      });
  ASSERT_TRUE(pair.haveSucceeded());
  for (Process* process : {pair.sender, pair.receiver}) {
    EXPECT_EQ(process->count("failed"), 1u) << process->written();
    EXPECT_TRUE(process->hasWritten(reason)) << process->written();
  }
}

// UCX copies a message of 8 MiB through the host's shared memory in pieces of 8 KiB. It waits for the device after each
// piece, under the worker lock.
constexpr uint64_t kStaged = 8 * kMiB;
constexpr uint64_t kPieces = kStaged / (9 * kKiB); // a lower bound

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
    EXPECT_EQ(pair->count("cuIpcOpenMemHandle_v2"), 0u) << "the memory is mapped again for each message";
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

// Threads that drive progress need no current CUDA context: UCX 1.22 pushes the context where it needs one.
TEST(DeviceLanes, ThreadsNeedNoContext) {
  const auto pair = exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"DRIVER_WITHOUT_CONTEXT", "y"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 1u);
}

// If a worker's options name no device, UCX starts before torch uses the device.
TEST(DeviceLanes, UcxMayStartBeforeTheDeviceIsUsed) {
  const auto pair =
      exchange(Kind::kDevice, Kind::kDevice, kMiB, {{"DEVICE_USED_LATER", "y"}, {"UCX_MEMTYPE_CACHE", "n"}});
  ASSERT_TRUE(pair->haveSucceeded());
  EXPECT_TRUE(pair->sender->hasWritten("lane cuda_ipc/cuda")) << pair->sender->written();
  EXPECT_EQ(pair->count("cuMemcpyDtoDAsync_v2"), 1u);
  EXPECT_EQ(pair->count("cuMemcpyAsync"), 0u);
}

// UCX's cache finds allocations older than itself by the mappings of NVIDIA's driver. The stub's mappings look like the
// host's, so UCX would let the processor copy such memory.
TEST(DeviceLanes, MemoryThatUcxTakesForTheHostsIsRefused) {
  expectDeviceMemoryIsRefused({{"DEVICE_USED_LATER", "y"}}, "UCX_MEMTYPE_CACHE=n");
}

// UCX checks more than the first memory. Here it has not seen the second allocation.
TEST(DeviceLanes, MemoryThatUcxTakesForTheHostsIsRefusedAfterOtherMemory) {
  Pair pair(
      {{"DEVICE_MEMORY_FIRST", "y"}},
      [](End& end) {
        Buffer buffer(Kind::kDevice, 4 * kMiB);
        buffer.fill(1);
        end.sendFrom(buffer);
        const Error why = end.trySending(*end.earlier);
        std::cout << "failed=" << (why.code() == ErrorCode::kDeviceFailed) << "\n" << why.message() << std::endl;
        buffer.fill(2);
        end.sendFrom(buffer);
      },
      [](End& end) {
        const Buffer buffer(Kind::kDevice, 4 * kMiB);
        for (const int number : {1, 2}) {
          end.receiveInto(buffer);
          require(buffer.isFilledWith(number), "a message has not come as it was sent");
        }
      });
  ASSERT_TRUE(pair.haveSucceeded());
  EXPECT_EQ(pair.sender->count("failed"), 1u) << pair.sender->written();
  EXPECT_TRUE(pair.sender->hasWritten("UCX_MEMTYPE_CACHE=n")) << pair.sender->written();
}

// Neither side may learn of the end before a late copy is made: then the sender reuses its memory, and the receiver
// reads.
TEST(DeviceLanes, LateCopiesAreWaitedForOnBothSides) {
  for (const char* nvlinks : {"0", "18"}) {
    Pair pair(
        {{"CUDA_STUB_COPY_US", "20000"}, {"CUDA_STUB_EVENT_US", "20000"}, {"CUDA_STUB_NVLINKS", nvlinks}},
        [](End& end) {
          Buffer buffer(Kind::kDevice, kMiB);
          for (int number = 1; number <= 3; ++number) {
            buffer.fill(number);
            end.sendFrom(buffer);
            buffer.fill(-1);
          }
        },
        [](End& end) {
          const Buffer buffer(Kind::kDevice, kMiB);
          for (int number = 1; number <= 3; ++number) {
            end.receiveInto(buffer);
            require(buffer.isFilledWith(number), "message " + std::to_string(number) + " is not as it was sent");
          }
        });
    ASSERT_TRUE(pair.haveSucceeded());
  }
}

// In UCX, endpoints that report dead peers have no pipelines (RNDV_PIPELINE_ERROR_HANDLING=n). So UCX must get no
// message with device memory on only one side. The agent stages such messages.
TEST(DeviceLanes, BetweenADeviceAndTheHostUcxCopiesInPieces) {
  constexpr uint64_t kCopyUs = 20;
  const Environment device{{"CUDA_STUB_COPY_US", std::to_string(kCopyUs)}};
  const auto expectPieces = [](Process& process) {
    EXPECT_GT(process.count("cuMemcpyAsync"), kPieces);
    EXPECT_EQ(process.count("cuStreamSynchronize"), process.count("cuMemcpyAsync"));
    EXPECT_GT(process.count("blocked_us"), kPieces * kCopyUs);
  };
  const auto fromDevice = exchange(Kind::kDevice, Kind::kHost, kStaged, device);
  ASSERT_TRUE(fromDevice->haveSucceeded());
  expectPieces(*fromDevice->sender);
  const auto toDevice = exchange(Kind::kHost, Kind::kDevice, kStaged, device);
  ASSERT_TRUE(toDevice->haveSucceeded());
  expectPieces(*toDevice->receiver);
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
    const auto fromSuch = exchange(kind, Kind::kDevice, kStaged);
    ASSERT_TRUE(fromSuch->haveSucceeded());
    EXPECT_EQ(fromSuch->count("cuMemcpyDtoDAsync_v2"), 0u);
    EXPECT_GT(fromSuch->sender->count("cuMemcpyAsync"), kPieces);
    const auto intoSuch = exchange(Kind::kDevice, kind, kStaged);
    ASSERT_TRUE(intoSuch->haveSucceeded());
    EXPECT_EQ(intoSuch->count("cuMemcpyDtoDAsync_v2"), 0u);
    EXPECT_GT(intoSuch->receiver->count("cuMemcpyAsync"), kPieces);
  }
}

// Between containers that do not share a PID namespace, handles are unusable.
TEST(DeviceLanes, UnusableHandlesAreNotNeeded) {
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
  std::cout << "cuda_ipc: " << hasCudaIpc(context) << "\nrefused: " << DeviceMemoryAccess(context).refusal().message()
            << "." << std::endl;
  ucp_cleanup(context);
}

TEST(DeviceMemoryRefusal, IsNoneWhereUcxHasFoundTheDriver) {
  Process process({}, [] {
    useTheDevice();
    sayWhatUcxCan();
  });
  EXPECT_TRUE(process.hasWritten("cuda_ipc: 1")) << process.written();
  EXPECT_TRUE(process.hasWritten("refused: ."));
  Process early({}, [] { // the device has not been used yet
    haveTheDriver();
    sayWhatUcxCan();
  });
  EXPECT_TRUE(early.hasWritten("cuda_ipc: 1")) << early.written();
  EXPECT_TRUE(early.hasWritten("refused: ."));
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

// UCX would take this memory for the host's, and the process would crash.
TEST(DeviceMemoryRefusal, IsWhatSendsAndReceivesEndWith) {
  expectDeviceMemoryIsRefused({{"UCX_TLS", "tcp,sysv,self"}}, "has started without CUDA");
}

// ------------------------------------------------------------------------------------------------------ waiting, dying

// No thread polls the device: UCX makes it wake the sleeping thread.
TEST(DeviceLanes, SleepingThreadIsWokenWhenTheDeviceIsDone) {
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
