// The device memory in which tensors arrive, and the staging of tensors that are sent.

#include "device_fixture.h"

#include "base/proc.h"
#include "memory/device_pool.h"
#include "tensors/device_copy.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace torch_ucx_rpc {
namespace {

constexpr uint64_t kLargeBytes = kLarge * sizeof(float);

// An allocator such as RMM's: it has entry points, and hands out released memory again at once.
class FakeRmm {
 public:
  static FakeRmm& instance() {
    static FakeRmm rmm;
    return rmm;
  }

  static DevicePool::EntryPoints entryPoints() {
    return {&FakeRmm::allocate, &FakeRmm::deallocate};
  }

  // From now on allocations wait at the gate, as they wait for a busy driver.
  void waitAt(std::shared_ptr<Gate> gate) {
    gate_.store(std::move(gate));
  }
  // From now on releases wait at the gate.
  void releaseAt(std::shared_ptr<Gate> gate) {
    releaseGate_.store(std::move(gate));
  }
  void setLimit(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    limitBytes_ = bytes;
  }
  uint64_t inUseBytes() {
    const std::lock_guard lock(mutex_);
    return inUseBytes_;
  }
  uint64_t allocations() {
    const std::lock_guard lock(mutex_);
    return allocations_;
  }
  // The stream of the last allocation.
  c10::Stream stream() {
    const std::lock_guard lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, fake(), reinterpret_cast<c10::StreamId>(stream_)); // NOLINT
  }
  // From now on a release ends the process.
  static void forbid() {
    instance().isForbidden_.store(true);
  }
  // Forgets the memory in use.
  void forget() {
    const std::lock_guard lock(mutex_);
    inUseBytes_ = 0;
  }
  bool isMisused() {
    const std::lock_guard lock(mutex_);
    return isMisused_;
  }

 private:
  struct Allocation {
    std::vector<std::byte> memory;
    int device;
    void* stream;
  };

  static void* allocate(size_t bytes, int device, void* stream) {
    if (bytes == 0) {
      return nullptr;
    }
    FakeRmm& self = instance();
    if (const std::shared_ptr<Gate> gate = self.gate_.load()) {
      gate->pass();
    }
    const std::lock_guard lock(self.mutex_);
    if (self.inUseBytes_ + bytes > self.limitBytes_) {
      throw std::bad_alloc();
    }
    self.inUseBytes_ += bytes;
    ++self.allocations_;
    self.stream_ = stream;
    // The handle must be that of the current stream, and not of a default stream.
    self.isMisused_ |= device != FakeDevice::currentDevice() || stream == nullptr ||
        stream != FakeGuard().getStreamNativeHandle(FakeGuard().getStream(fake(FakeDevice::currentDevice())));
    for (auto idle = self.idle_.begin(); idle != self.idle_.end(); ++idle) {
      if (idle->second.memory.size() == bytes && idle->second.device == device) {
        idle->second.stream = stream;
        return self.inUse_.insert(self.idle_.extract(idle)).position->first;
      }
    }
    Allocation made{std::vector<std::byte>(bytes), device, stream};
    void* const data = made.memory.data();
    self.inUse_.emplace(data, std::move(made));
    return data;
  }

  static void deallocate(void* data, size_t bytes, int device, void* stream) {
    FakeRmm& self = instance();
    if (self.isForbidden_.load()) {
      std::_Exit(2);
    }
    if (const std::shared_ptr<Gate> gate = self.releaseGate_.load()) {
      gate->pass();
    }
    const std::lock_guard lock(self.mutex_);
    auto node = self.inUse_.extract(data);
    if (!node || node.mapped().memory.size() != bytes || node.mapped().device != device ||
        node.mapped().stream != stream) {
      self.isMisused_ = true;
      return;
    }
    self.inUseBytes_ -= bytes;
    std::fill(node.mapped().memory.begin(), node.mapped().memory.end(), kReleased);
    self.idle_.insert(std::move(node));
  }

  std::mutex mutex_;
  std::map<void*, Allocation> inUse_;
  std::map<void*, Allocation> idle_;
  uint64_t limitBytes_ = UINT64_MAX;
  uint64_t inUseBytes_ = 0;
  uint64_t allocations_ = 0;
  void* stream_ = nullptr;
  bool isMisused_ = false;
  std::atomic<bool> isForbidden_{false};
  std::atomic<std::shared_ptr<Gate>> gate_;
  std::atomic<std::shared_ptr<Gate>> releaseGate_;
};

// Asks again and again: one thread collects at a time, so collect() does nothing while an agent's thread collects.
void expectToGiveAllBack() {
  DevicePool& pool = DevicePool::instance();
  EXPECT_TRUE(eventually([&] {
    pool.collect();
    return pool.statistics().inUseBytes == 0 && pool.statistics().heldBytes == 0;
  })) << pool.statistics().inUseBytes
      << " bytes in use, " << pool.statistics().heldBytes << " held";
}

// Memory from each source other than torch's own allocator.
class DeviceMemoryTest : public DeviceTest, public testing::WithParamInterface<DevicePool::Source> {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    device_.ignoreRecords(true);
    pool_.setSource(GetParam(), FakeRmm::entryPoints());
  }

  void TearDown() override {
    rmm_.setLimit(UINT64_MAX);
    received_.clear();
    device_.run();
    expectToGiveAllBack();
    DeviceTest::TearDown();
    pool_.setSource(DevicePool::Source::kTorch);
    device_.ignoreRecords(false);
    EXPECT_EQ(rmm_.inUseBytes(), 0u);
    EXPECT_FALSE(rmm_.isMisused());
  }

  // Reads the tensor on a stream that the agent does not know, and keeps nothing.
  Handler lookOnAnotherStream() {
    return [this](Message& request) {
      c10::Event arrived(kFake);
      arrived.record(FakeGuard().getStream(fake()));
      arrived.block(latestStream());
      const c10::StreamGuard guard(latestStream());
      looks_.emplace_back(request.tensors().at(0));
      return completed("");
    };
  }

  DevicePool& pool_ = DevicePool::instance();
  FakeRmm& rmm_ = FakeRmm::instance();
  std::vector<Look> looks_;
};

INSTANTIATE_TEST_SUITE_P(
    Sources,
    DeviceMemoryTest,
    testing::Values(DevicePool::Source::kReplacedTorch, DevicePool::Source::kEntryPoints),
    [](const auto& source) {
      return source.param == DevicePool::Source::kEntryPoints ? "EntryPoints" : "ReplacedTorch";
    });

TEST_P(DeviceMemoryTest, ReleasedMemoryIsHeldWhileAnyStreamUsesIt) {
  startWith(lookOnAnotherStream(), {{c10::kCPU, fake()}});
  for (const int64_t elements : {kLarge, kSmall}) {
    looks_.clear();
    (void)answer(call(0, 1, "", {at::full({elements}, 5.f)}));
    ASSERT_TRUE(eventually([&] { return metric(1, "device_pool.held_bytes") != 0; })) << elements;
    (void)answer(call(0, 1, "", {at::full({elements}, 6.f)}));
    device_.run();
    ASSERT_EQ(looks_.size(), 2u);
    EXPECT_TRUE(looks_[0].hasSeen(5)) << elements;
    EXPECT_TRUE(looks_[1].hasSeen(6)) << elements;
    // The memory comes back although no tensor is received or released.
    EXPECT_TRUE(eventually([&] { return pool_.statistics().heldBytes == 0; }));
  }
}

TEST_P(DeviceMemoryTest, NewTensorsDoNotWaitForHeldMemory) {
  startWith(keep(), {{fake(1), fake()}});
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5, fake(1))}));
  std::vector<Look> looks;
  {
    const c10::StreamGuard guard(latestStream());
    looks.emplace_back(received_.at(0));
  }
  received_.clear();
  EXPECT_EQ(pool_.statistics().heldBytes, kLargeBytes);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 6, fake(1))})); // the device has not run
  EXPECT_EQ(pool_.statistics().inUseBytes, kLargeBytes);
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 6));
  device_.run();
  EXPECT_TRUE(looks[0].hasSeen(5));
}

// Questions would take long: a device has 129 streams.
TEST_P(DeviceMemoryTest, ReleaseAsksTheDeviceNothing) {
  startWith(keep(), {{fake(), fake(1)}});
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  EXPECT_EQ(received_.at(0).device(), fake(1));
  EXPECT_EQ(pool_.statistics().inUseBytes, kLargeBytes);
  agent(0).shutdown(); // ends the timers, which ask
  agent(1).shutdown();
  const uint64_t before = device_.questions();
  received_.clear();
  EXPECT_EQ(device_.questions(), before);
  EXPECT_EQ(pool_.statistics().inUseBytes, 0u);
  EXPECT_EQ(pool_.statistics().heldBytes, kLargeBytes);
  pool_.collect();
  EXPECT_GE(device_.questions(), before + kStreams - 1);
  EXPECT_EQ(pool_.statistics().heldBytes, 0u);
  EXPECT_EQ(rmm_.inUseBytes(), 0u);
}

TEST_P(DeviceMemoryTest, StreamsAreAskedOnceForManyBlocks) {
  c10::DataPtr last = pool_.allocate(fake(), 64);
  (void)allStreams(fake());
  const uint64_t before = device_.questions();
  for (int block = 0; block < 100; ++block) {
    last = pool_.allocate(fake(), 64); // releases the block before
  }
  EXPECT_LT(device_.questions() - before, 10u * kStreams);
  // Few blocks are held although collect() is never called.
  EXPECT_LT(pool_.statistics().heldBytes, 20u * 64);
  last.clear();
}

// A program may have used the memory on a stream that torch does not know, and may then destroy that stream.
TEST_P(DeviceMemoryTest, StreamsOfOthersAreAskedAtOnce) {
  const c10::Stream other(c10::Stream::UNSAFE, fake(), kStreams + 7);
  c10::DataPtr data = pool_.allocate(fake(), 64);
  {
    const c10::StreamGuard guard(other);
    device_.launch(fake(), [] {});
    data.clear();
  }
  pool_.collect();
  EXPECT_EQ(pool_.statistics().heldBytes, 64u);
  device_.run();
  pool_.collect();
  EXPECT_EQ(pool_.statistics().heldBytes, 0u);
}

// At the end of a process RMM may be gone before the last tensors. (Each process has its own pool, so the test needs a
// new process.)
TEST_P(DeviceMemoryTest, StoppedPoolGivesNothingBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe"); // starts the new process without threads
  EXPECT_EXIT(
      {
        c10::DataPtr early = pool_.allocate(fake(), 64);
        c10::DataPtr late = pool_.allocate(fake(), 64);
        early.clear();
        pool_.stop();
        device_.fail(true);
        FakeRmm::forbid();
        late.clear();
        pool_.collect();
        std::_Exit(pool_.statistics().inUseBytes == 0 ? 0 : 1);
      },
      testing::ExitedWithCode(0),
      "");
}

TEST_P(DeviceMemoryTest, TensorsOutliveTheAgents) {
  startWith(keep(), same_);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  agent(0).shutdown();
  agent(1).shutdown();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
}

TEST_P(DeviceMemoryTest, ReleaseOnADeviceThatHasFailedDoesNotThrow) {
  startWith(keep(), same_);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  device_.launch(fake(), [] {});
  device_.fail(true);
  EXPECT_NO_THROW(received_.clear());
  EXPECT_NO_THROW(pool_.collect());
  expectToGiveAllBack();
  device_.fail(false);
  // The memory is lost on purpose, so the test does not count it.
  blocksAtStart_ = device_.blocksInUse();
  rmm_.forget();
}

// -------------------------------------------------------------------------------------------------- of entry points

class EntryPointsTest : public DeviceMemoryTest {};

INSTANTIATE_TEST_SUITE_P(Sources, EntryPointsTest, testing::Values(DevicePool::Source::kEntryPoints));

TEST_P(EntryPointsTest, ArrivalsOnDevicesUseTheirMemory) {
  startWith(keep(), {{c10::kCPU, fake()}, {fake(1), fake(1)}});
  const uint64_t before = rmm_.allocations();
  (void)answerWhileRunning(
      call(0, 1, "", {at::full({kLarge}, 5.f), at::full({kSmall}, 6.f), onDevice(kLarge, 7, fake(1))}));
  device_.run();
  EXPECT_EQ(rmm_.allocations(), before + 3);
  ASSERT_EQ(received_.size(), 3u);
  for (size_t index = 0; index < 3; ++index) {
    EXPECT_EQ(received_[index].device(), fake(index == 2 ? 1 : 0));
    EXPECT_TRUE(isAll(hostView(received_[index]), 5 + static_cast<double>(index)));
  }
}

TEST_P(EntryPointsTest, EmptyTensorsNeedNoMemory) {
  startWith(keep(), {{c10::kCPU, fake()}, {fake(1), fake(1)}});
  (void)answerWhileRunning(call(0, 1, "", {at::empty({0, 3}), onDevice(0, 7, fake(1))}));
  ASSERT_EQ(received_.size(), 2u);
  EXPECT_EQ(received_[0].device(), fake(0));
  EXPECT_EQ(received_[0].sizes(), at::IntArrayRef({0, 3}));
  EXPECT_EQ(received_[1].device(), fake(1));
}

TEST_P(EntryPointsTest, SmallTensorsAreWrittenWhenEarlierOwnersAreDone) {
  startWith(keep(), {{c10::kCPU, fake()}});
  (void)answer(call(0, 1, "", {at::full({kSmall}, 5.f)}));
  device_.run();
  received_.clear();
  {
    // Streams of torch's pool are shared: another user of this stream uses the memory in the stream's order.
    const c10::StreamGuard guard(rmm_.stream());
    void* const stream = FakeGuard().getStreamNativeHandle(rmm_.stream());
    void* const memory = FakeRmm::entryPoints().allocate(kSmall * sizeof(float), 0, stream);
    device_.launch(fake(), [memory] { std::fill_n(static_cast<float*>(memory), kSmall, 9.f); });
    FakeRmm::entryPoints().deallocate(memory, kSmall * sizeof(float), 0, stream);
  }
  (void)answer(call(0, 1, "", {at::full({kSmall}, 6.f)}));
  device_.run();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 6));
}

TEST_P(EntryPointsTest, HeldMemoryIsAwaitedWhenNoneIsLeft) {
  startWith(lookOnAnotherStream(), {{c10::kCPU, fake()}});
  rmm_.setLimit(kLargeBytes);
  (void)answer(call(0, 1, "", {at::full({kLarge}, 5.f)}));
  ASSERT_TRUE(eventually([&] { return pool_.statistics().heldBytes != 0; }));
  (void)answer(call(0, 1, "", {at::full({kLarge}, 6.f)}));
  device_.run();
  EXPECT_TRUE(looks_.at(0).hasSeen(5));
  EXPECT_TRUE(looks_.at(1).hasSeen(6));
}

TEST_P(EntryPointsTest, MemoryThatAnotherThreadReleasesIsAwaited) {
  startWith(keep(), across_);
  rmm_.setLimit(kLargeBytes);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  rmm_.releaseAt(gate_);
  received_.clear();
  ASSERT_TRUE(eventually([&] { return device_.run(), gate_->waiting() != 0; })) << "the agents collect";
  const Future future = call(0, 1, "", {onDevice(kLarge, 6)});
  for (int number = 0; number < 10; ++number) {
    exchangeWithoutTensors();
  }
  EXPECT_FALSE(future->completed());
  rmm_.releaseAt(nullptr);
  gate_->open();
  (void)answer(future);
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 6));
}

TEST_P(EntryPointsTest, TensorLargerThanTheMemoryIsRefused) {
  startWith(keep(), {{c10::kCPU, fake()}});
  rmm_.setLimit(kLargeBytes - 1);
  EXPECT_TRUE(contains(failure(call(0, 1, "", {at::full({kLarge}, 5.f)})), "memory"));
  rmm_.setLimit(kLargeBytes);
  (void)answer(call(0, 1, "", {at::full({kLarge}, 5.f)}));
  device_.run();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
}

// Allocators may wait for the driver, or for Python.
TEST_P(EntryPointsTest, AllocationHoldsUpNoOtherMessage) {
  startWith(keep(), across_);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  rmm_.waitAt(gate_);
  const Future future = call(0, 1, "", {onDevice(kLarge, 6)});
  for (int number = 0; number < 10; ++number) {
    exchangeWithoutTensors();
    (void)answer(call(1, 0, "the other way"));
  }
  EXPECT_FALSE(future->completed());
  gate_->open();
  rmm_.waitAt(nullptr);
  (void)answer(future);
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 6));
}

TEST_P(EntryPointsTest, MemoryAllocatedForALostPeerIsReleased) {
  startWith(keep(), across_);
  (void)answer(call(0, 1, "", {onDevice(kLarge, 5)}));
  received_.clear();
  rmm_.waitAt(gate_);
  const uint64_t before = rmm_.allocations();
  const Future future = call(0, 1, "", {onDevice(kLarge, 6)});
  ASSERT_TRUE(eventually([&] { return gate_->waiting() != 0; }));
  network_.kill("address 0");
  EXPECT_TRUE(contains(failure(call(1, 0, "still there?")), "w0"));
  gate_->open();
  rmm_.waitAt(nullptr);
  ASSERT_TRUE(eventually([&] { return rmm_.allocations() == before + 1; }));
  // Ask RMM and not the pool: the pool counts an allocation a moment after RMM has made it.
  EXPECT_TRUE(eventually([&] {
    pool_.collect();
    return rmm_.inUseBytes() == 0;
  })) << pool_.statistics().inUseBytes
      << " bytes in use, " << pool_.statistics().heldBytes << " held";
}

// ------------------------------------------------------------------------------------------------- what torch has

// As after torch.cuda.memory.change_current_allocator, tensors use another allocator than the registered one.
TEST_F(DeviceTest, AllocatorThatReplacesTorchsIsUsed) {
  c10::SetAllocator(kFake, c10::GetAllocator(c10::kCPU), 1);
  EXPECT_EQ(allocatorOf(kFake), &device_);
  c10::SetAllocator(kFake, &device_, 1);

  static std::atomic<int> asked{0};
  DevicePool::instance().setSource(DevicePool::Source::kReplacedTorch, {}, [](const c10::DeviceType& type) {
    asked.fetch_add(1);
    return allocatorOf(type);
  });
  startWith(keep(), {{c10::kCPU, fake()}});
  (void)answer(call(0, 1, "", {at::full({kLarge}, 5.f)}));
  EXPECT_EQ(asked.load(), 1);
  device_.run();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
  received_.clear();
  expectToGiveAllBack();
  DevicePool::instance().setSource(DevicePool::Source::kTorch);
}

TEST_F(DeviceTest, AllStreamsAreFoundWhileOthersTakeSome) {
  for (int turn = 1; turn < kStreams; ++turn) {
    device_.skipPoolStreamAfter(turn);
    EXPECT_EQ(allStreams(fake()).size(), static_cast<size_t>(kStreams)) << "skipped at turn " << turn;
  }
}

// ---------------------------------------------------------------------------------------------------------- staging

// Workers that look as if they were on one machine.
class StagingTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    network_.shareDeviceMemory(false);
  }

  std::vector<Member> asToldTo(worker_id_t /*rank*/, std::vector<Member> members) override {
    for (Member& member : members) {
      member.bootId = areApart_ ? member.bootId : "one machine";
      member.pid = getpid();
      member.processStartTime = readProcStat("/proc/self").value().startTicks;
      member.pidNamespace = areInContainers_ ? 1 + static_cast<uint64_t>(member.rank) : 1;
    }
    return members;
  }

  bool areApart_ = false;
  bool areInContainers_ = false;
};

TEST_F(StagingTest, UnshareableMemoryIsCopiedToTheHostInOrder) {
  startWith(keep(), same_);
  at::Tensor sent = onDevice(kLarge, 0);
  device_.launch(fake(), [view = hostView(sent)] { view.fill_(7); });
  const Future future = call(0, 1, "", {sent, sent.narrow(0, 10, 20), onDevice(kSmall, 8, fake(1))});
  device_.launch(fake(), [view = hostView(sent)] { view.fill_(9); }); // the copy has been made before this
  sent.reset();
  exchangeWithoutTensors();
  EXPECT_FALSE(future->completed());
  (void)answerWhileRunning(future);
  device_.run();
  ASSERT_EQ(received_.size(), 3u);
  EXPECT_EQ(received_[0].device(), fake());
  EXPECT_TRUE(isAll(hostView(received_[0]), 7));
  EXPECT_TRUE(received_[0].is_alias_of(received_[1]));
  EXPECT_EQ(received_[2].device(), fake(1));
  EXPECT_TRUE(isAll(hostView(received_[2]), 8));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), kLargeBytes + kSmall * sizeof(float));
}

TEST_F(StagingTest, AnswersAreStagedToo) {
  startWith([&](Message& /*request*/) { return reply({onDevice(kLarge, 5)}); }, same_, same_);
  const c10::intrusive_ptr<Message> response = answerWhileRunning(call(0, 1, ""));
  device_.run();
  EXPECT_EQ(response->tensors().at(0).device(), fake());
  EXPECT_TRUE(isAll(hostView(response->tensors()[0]), 5));
  EXPECT_EQ(metric(1, "device_pool.staged_bytes"), kLargeBytes);
}

TEST_F(StagingTest, MemoryThatCanBeSharedIsNotStaged) {
  network_.shareDeviceMemory(true);
  startWith(keep(), same_);
  (void)answerWhileRunning(call(0, 1, "", {onDevice(kLarge, 5)}));
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), 0u);
}

// UCX cannot map the memory of a process in another pid namespace.
TEST_F(StagingTest, MemoryForAnotherContainerIsStaged) {
  network_.shareDeviceMemory(true);
  areInContainers_ = true;
  startWith(keep(), same_);
  (void)answerWhileRunning(call(0, 1, "", {onDevice(kLarge, 5)}));
  device_.run();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), kLargeBytes);
}

TEST_F(StagingTest, TransportThatTakesNoDeviceMemoryIsGivenNone) {
  network_.refuseDeviceMemory({ErrorCode::kDeviceFailed, "this UCX has no CUDA"});
  areApart_ = true;
  testing::internal::CaptureStderr();
  startWith(keep(), same_);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "this UCX has no CUDA")) << log;
  (void)answerWhileRunning(call(0, 1, "", {onDevice(kLarge, 5), at::full({kLarge}, 6.f)}));
  device_.run();
  EXPECT_EQ(received_.at(0).device(), fake());
  EXPECT_TRUE(isAll(hostView(received_[0]), 5));
  EXPECT_TRUE(isAll(received_.at(1), 6));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), kLargeBytes);
}

TEST_F(StagingTest, NothingIsStagedForOtherMachinesNorForOneself) {
  areApart_ = true;
  startWith(keep(), same_);
  (void)answerWhileRunning(call(0, 1, "", {onDevice(kLarge, 5)}));
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
  (void)answerWhileRunning(call(0, 0, "", {onDevice(kLarge, 6)}));
  device_.run();
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 6));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
