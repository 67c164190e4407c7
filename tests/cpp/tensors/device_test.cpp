// The order in which the streams of devices, and the transport, use the memory of tensors.

#include "device_fixture.h"
#include "memory/device_pool.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace torch_ucx_rpc {
namespace {

// ---------------------------------------------------------------------------------------------------------- streams

TEST_F(DeviceTest, TensorIsReadWhenItsStreamHasMadeIt) {
  startWith(keep(), same_);
  for (const int64_t elements : {kSmall, kLarge}) {
    at::Tensor sent = onDevice(elements, 0);
    device_.launch(fake(), [view = hostView(sent)] { view.fill_(7); });
    const Future future = call(0, 1, "", {sent});
    sent.reset();
    exchangeWithoutTensors();
    (void)answerWhileRunning(future);
    ASSERT_EQ(received_.size(), 1u);
    EXPECT_EQ(received_[0].device(), fake());
    EXPECT_TRUE(isAll(hostView(received_[0]), 7));
  }
}

// A fresh CUDA event is not ready, even on an idle stream, so a message that needed it would wait for the timer.
TEST_F(DeviceTest, TensorOnAnIdleStreamWaitsForNoEvent) {
  startWith(keep(), same_);
  device_.completeEventsLater(true);
  for (const int64_t elements : {kSmall, kLarge}) {
    (void)answer(call(0, 1, "", {onDevice(elements, 7)})); // the device does not run
    EXPECT_TRUE(isAll(hostView(received_.at(0)), 7));
  }
}

TEST_F(DeviceTest, MessageAsksOneStreamOnEachSide) {
  startWith(keep(), same_);
  for (const int64_t elements : {kSmall, kLarge}) {
    // Each thread asks once more, to get the device's context.
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (int round = 0; round < 20; ++round) {
      const uint64_t before = device_.questions();
      (void)answer(call(0, 1, "", {onDevice(elements, 7)}));
      fewest = std::min(fewest, device_.questions() - before);
    }
    EXPECT_EQ(fewest, 2u) << "one for the sender's stream, and one for the receiver's";
  }
}

TEST_F(DeviceTest, PackedViewIsMadeInStreamOrder) {
  startWith(keep(), same_);
  const at::Tensor base = at::empty({1000, 1000}, at::TensorOptions(fake()).dtype(at::kFloat));
  device_.launch(fake(), [view = hostView(base)] { view.fill_(7); });
  (void)answerWhileRunning(call(0, 1, "", {base.select(1, 5)}));
  ASSERT_EQ(received_.size(), 1u);
  EXPECT_EQ(received_[0].sizes(), at::IntArrayRef({1000}));
  EXPECT_TRUE(isAll(hostView(received_[0]), 7));
}

TEST_F(DeviceTest, TensorBeyondTheEndOfItsStorageIsRefused) {
  startWith(keep(), same_);
  for (const int64_t elements : {kSmall, kLarge}) {
    const at::Tensor sent = onDevice(elements, 7);
    sent.storage().set_nbytes(sent.nbytes() - 1);
    EXPECT_THROW((void)call(0, 1, "", {sent}), c10::Error);
  }
  (void)answer(call(0, 1, "", {onDevice(kSmall, 7)})); // the next message arrives
}

TEST_F(DeviceTest, HandlerComputesOnStreamsOfItsOwn) {
  std::atomic<c10::StreamId> stream{0};
  startWith(
      [&](Message& request) {
        stream.store(FakeDevice::currentStream(0));
        const at::Tensor made = onDevice(kLarge, 0);
        device_.launch(
            fake(), [from = hostView(request.tensors()[0]), to = hostView(made)] { to.copy_(from).add_(1); });
        return reply({made});
      },
      same_,
      same_);
  // Each request's memory is released before the handler's kernel has read it. The next request must not get that
  // memory.
  std::vector<Future> futures;
  for (int number = 0; number < 4; ++number) {
    futures.push_back(call(0, 1, "", {onDevice(kLarge, number)}));
  }
  ASSERT_TRUE(eventually([&] {
    device_.run();
    return std::all_of(futures.begin(), futures.end(), [](const Future& future) { return future->completed(); });
  }));
  EXPECT_NE(stream.load(), 0);
  for (int number = 0; number < 4; ++number) {
    EXPECT_TRUE(isAll(hostView(answer(futures[static_cast<size_t>(number)])->tensors()[0]), number + 1)) << number;
  }
  EXPECT_EQ(FakeDevice::currentStream(0), 0) << "the caller's stream is as it was";
}

class StreamPriorityTest : public DeviceTest, public testing::WithParamInterface<int> {};

TEST_P(StreamPriorityTest, AppliesToTheStreamsOfHandlers) {
  std::atomic<int> ofHandler{1};
  AgentOptions options;
  options.streamPriority = GetParam();
  startWith(
      [&](Message& /*request*/) {
        ofHandler.store(FakeDevice::priorityOf(FakeDevice::currentStream(0)));
        return completed("");
      },
      same_,
      same_,
      options);
  (void)answer(call(0, 1, "", {onDevice(kSmall, 5)}));
  EXPECT_EQ(ofHandler.load(), GetParam());
}

TEST_P(StreamPriorityTest, AppliesToTheStreamsThatCopyAnswers) {
  AgentOptions options;
  options.streamPriority = GetParam();
  const auto answerFromTheHost = [](Message& /*request*/) { return completed("", {at::full({kSmall}, 5.f)}); };
  startWith(answerFromTheHost, {}, {{c10::kCPU, fake()}}, options);
  const Future future = call(0, 1, "");
  ASSERT_TRUE(eventually([&] { return future->completed(); })); // before the device has copied
  const std::vector<c10::StreamId> busy = device_.busyStreams(fake());
  ASSERT_EQ(busy.size(), 1u);
  EXPECT_EQ(FakeDevice::priorityOf(busy.front()), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Priorities, StreamPriorityTest, testing::Values(0, -1));

TEST_F(DeviceTest, RequestOutlivesTheHandlersKernels) {
  std::vector<Look> looks;
  startWith(lookAtFirst(looks), {{c10::kCPU, fake()}});
  (void)answer(call(0, 1, "", {at::full({kLarge}, 5.f)}));
  (void)answer(call(0, 1, "", {at::full({kLarge}, 6.f)})); // it must not get the first one's memory
  device_.run();
  ASSERT_EQ(looks.size(), 2u);
  EXPECT_TRUE(looks[0].hasSeen(5));
  EXPECT_TRUE(looks[1].hasSeen(6));
}

// Small tensors come with the body, and are copied to the device on a stream.
TEST_F(DeviceTest, HandlerIsOrderedAfterTheArrivalOfSmallTensors) {
  std::vector<Look> looks;
  startWith(lookAtFirst(looks), {{c10::kCPU, fake()}});
  (void)answer(call(0, 1, "", {at::full({kSmall}, 5.f)}));
  device_.run();
  EXPECT_TRUE(looks.at(0).hasSeen(5));
}

TEST_F(DeviceTest, WaitingCallersStreamIsOrderedAfterTheAnswer) {
  startWith([&](Message& /*request*/) { return completed("", {at::full({kSmall}, 5.f)}); }, {}, {{c10::kCPU, fake()}});
  Future future = call(0, 1, "");
  ASSERT_TRUE(eventually([&] { return future->completed(); }));
  const c10::StreamGuard guard(latestStream()); // runs first, unless it waits
  future->wait();
  c10::intrusive_ptr<Message> response = future->value().toCustomClass<Message>();
  const Look look(response->tensors().at(0));
  response.reset(); // the memory must live on
  future.reset();
  EXPECT_FALSE(look.hasSeen(5)) << "nothing has run yet";
  device_.run();
  EXPECT_TRUE(look.hasSeen(5));
}

TEST_F(DeviceTest, CallbackIsOrderedAfterTheAnswer) {
  startWith([&](Message& /*request*/) { return completed("", {at::full({kSmall}, 5.f)}); }, {}, {{c10::kCPU, fake()}});
  std::vector<Look> looks;
  std::atomic<bool> hasRun{false};
  call(0, 1, "")->addCallback([&](JitFuture& future) {
    looks.emplace_back(future.value().toCustomClass<Message>()->tensors().at(0));
    hasRun.store(true);
  });
  ASSERT_TRUE(eventually([&] { return hasRun.load(); }));
  device_.run();
  EXPECT_TRUE(looks.at(0).hasSeen(5));
}

TEST_F(DeviceTest, AnswerGivenLaterIsReadWhenItsStreamHasMadeIt) {
  const Future later = deviceFuture();
  startWith([&](Message& request) { return textOf(request) == "later" ? later : completed(""); }, same_, same_);
  const Future future = call(0, 1, "later");
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.server_active_async_calls") == 1; }));
  {
    const c10::StreamGuard guard(latestStream());
    at::Tensor made = onDevice(kLarge, 0);
    device_.launch(fake(), [view = hostView(made)] { view.fill_(3); });
    complete(later, "", {made});
  }
  exchangeWithoutTensors();
  EXPECT_FALSE(future->completed());
  EXPECT_TRUE(isAll(hostView(answerWhileRunning(future)->tensors().at(0)), 3));
}

TEST_F(DeviceTest, AnswerMadeOnAnotherStreamIsReadWhenThatHasMadeIt) {
  startWith(
      [&](Message& request) {
        if (textOf(request) != "make") {
          return completed("");
        }
        const c10::StreamGuard guard(latestStream());
        const at::Tensor made = onDevice(kLarge, 0);
        device_.launch(fake(), [view = hostView(made)] { view.fill_(3); });
        return reply({made});
      },
      same_,
      same_);
  const Future future = call(0, 1, "make");
  ASSERT_TRUE(eventually([&] { return handled_.load() == 1; }));
  exchangeWithoutTensors();
  EXPECT_FALSE(future->completed());
  EXPECT_TRUE(isAll(hostView(answerWhileRunning(future)->tensors().at(0)), 3));
}

TEST_F(DeviceTest, UnreadyMessageDelaysNoOther) {
  startWith([&](Message& /*request*/) { return completed(""); }, same_);
  device_.launch(fake(), [] {});
  std::vector<at::Tensor> all; // as many parts as may be in flight
  for (size_t number = 0; number < PushShare::kMaxParts; ++number) {
    all.push_back(onDevice(kSmall, 1));
  }
  const Future waiting = call(0, 1, "", all);
  (void)answer(call(0, 1, "", {at::ones({kLarge})}));
  EXPECT_FALSE(waiting->completed());
  (void)answerWhileRunning(waiting);
}

// torch's allocator gives released memory back to its stream while kernels there still read it.
TEST_F(DeviceTest, NothingIsReceivedIntoMemoryThatIsStillRead) {
  startWith(keep(), across_);
  const std::vector<Look> looks = lookOnAllStreams(fake(1));
  const Future future = call(0, 1, "", {onDevice(kLarge, 5)});
  exchangeWithoutTensors();
  (void)answerWhileRunning(future);
  EXPECT_TRUE(std::all_of(looks.begin(), looks.end(), [](const Look& look) { return look.hasSeen(9); }));
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
}

// UCX would copy such tensors in small pieces. So they arrive in pinned memory, and are copied on the handler's
// streams.
TEST_F(DeviceTest, HostTensorsTakeDeviceMemoryOnlyOnArrival) {
  startWith(keep(), {{c10::kCPU, fake(1)}});
  const uint64_t pinned = FakeHostAllocator::allocations();
  const std::vector<Look> looks = lookOnAllStreams(fake(1));
  (void)answer(call(0, 1, "", {at::full({kLarge}, 5.f)})); // the device does not run
  EXPECT_EQ(FakeHostAllocator::allocations(), pinned + 1);
  EXPECT_EQ(received_.at(0).device(), fake(1));
  device_.run();
  EXPECT_TRUE(std::all_of(looks.begin(), looks.end(), [](const Look& look) { return look.hasSeen(9); }));
  EXPECT_TRUE(isAll(hostView(received_.at(0)), 5));
}

TEST_F(DeviceTest, SenderCopiesTensorsForTheHost) {
  startWith(keep(), {{fake(), c10::kCPU}});
  at::Tensor sent = onDevice(kLarge, 0);
  device_.launch(fake(), [view = hostView(sent)] { view.fill_(7); });
  const Future future = call(0, 1, "", {sent});
  device_.launch(fake(), [view = hostView(sent)] { view.fill_(9); }); // the copy has been made before this
  sent.reset();
  exchangeWithoutTensors();
  EXPECT_FALSE(future->completed());
  (void)answerWhileRunning(future);
  EXPECT_TRUE(received_.at(0).is_cpu());
  EXPECT_TRUE(isAll(received_[0], 7));
  EXPECT_EQ(metric(0, "device_pool.staged_bytes"), 0u) << "the map asks for this copy";
}

TEST_F(DeviceTest, CallToOneselfKeepsTheOrderOfStreams) {
  std::vector<Look> looks;
  startWith(
      [&](Message& request) {
        for (const at::Tensor& tensor : request.tensors()) {
          looks.emplace_back(tensor);
        }
        return reply(request.tensors());
      },
      {{fake(0), fake(1)}, {c10::kCPU, fake(0)}},
      {{fake(1), fake(0)}, {fake(0), c10::kCPU}});
  at::Tensor sent;
  {
    const c10::StreamGuard guard(latestStream()); // the memory goes back to this stream, which runs before the caller's
    sent = onDevice(kLarge, 5);
  }
  device_.launch(fake(), [view = hostView(sent)] { view.add_(2); });
  const Future future = call(0, 0, "", {sent, at::full({kLarge}, 5.f)});
  sent.reset();
  const c10::intrusive_ptr<Message> response = answer(future); // an answer for the CPU makes the device run
  device_.run();
  ASSERT_EQ(looks.size(), 2u);
  EXPECT_TRUE(looks[0].hasSeen(7));
  EXPECT_TRUE(looks[1].hasSeen(5));
  EXPECT_EQ(response->tensors().at(0).device(), fake(0));
  EXPECT_TRUE(isAll(hostView(response->tensors()[0]), 7));
  EXPECT_TRUE(isAll(response->tensors().at(1), 5));
}

// UCX's CUDA transports need a context on the driving thread.
TEST_F(DeviceTest, DriverHasADeviceContext) {
  startWith([&](Message& /*request*/) { return completed(""); }, same_);
  std::thread caller([&] {
    EXPECT_TRUE(eventually([&] {
      agent(0).calls().waitDriving(*call(0, 1, "")); // drives, unless the answer is already here
      return device_.threads().contains(std::this_thread::get_id());
    }));
  });
  caller.join();
}

// Otherwise large tensors for devices would wait for each other, for host memory that they do not need.
TEST_F(DeviceTest, TensorsForDevicesTakeNothingOfTheHostsWindow) {
  startWith(
      [this](Message& /*request*/) {
        gate_->pass();
        return completed("");
      },
      {{fake(), fake()}, {fake(1), c10::kCPU}});
  const Future toDevice = call(0, 1, "", {onDevice(kLarge, 1)});
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  EXPECT_EQ(metric(1, "window.in_use_bytes"), 0u);
  const Future toHost = call(0, 1, "", {onDevice(kLarge, 1, fake(1))});
  ASSERT_TRUE(eventually([&] {
    device_.run();
    return gate_->waiting() == 2;
  }));
  EXPECT_EQ(metric(1, "window.in_use_bytes"), kLarge * sizeof(float));
  gate_->open();
  (void)answer(toDevice);
  (void)answer(toHost);
}

// ----------------------------------------------------------------------------------------------------------- failure

TEST_F(DeviceTest, TimedOutRequestIsNotSent) {
  startWith([&](Message& /*request*/) { return completed(""); }, same_);
  device_.launch(fake(), [] {});
  EXPECT_TRUE(contains(failure(call(0, 1, "", {onDevice(kLarge, 1)}, 0.05f)), "ran for more than"));
  exchangeWithoutTensors(); // gives the timer time to cancel the request, which it does after it has failed the call
  device_.run();
  exchangeWithoutTensors();
  EXPECT_EQ(metric(0, "agent.calls_timed_out"), 1u);
}

TEST_F(DeviceTest, UnreadyMessageEndsWithThePeer) {
  startWith([&](Message& /*request*/) { return completed(""); }, same_);
  (void)answer(call(0, 1, ""));
  device_.launch(fake(), [] {});
  const Future future = call(0, 1, "", {onDevice(kLarge, 1)});
  network_.kill("address 1");
  EXPECT_TRUE(contains(failure(future), "w1"));
  EXPECT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_; }));
}

TEST_F(DeviceTest, UnreadyMessageEndsWithTheAgent) {
  startWith([&](Message& /*request*/) { return completed(""); }, same_);
  device_.launch(fake(), [] {});
  const Future future = call(0, 1, "", {onDevice(kLarge, 1)});
  agent(0).shutdown();
  EXPECT_TRUE(contains(failure(future), "shut down"));
  EXPECT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_; }));
}

TEST_F(DeviceTest, WaitForMemoryEndsWhenTheSenderIsGone) {
  startWith([&](Message& /*request*/) { return completed(""); }, across_);
  exchangeWithoutTensors();
  (void)lookOnAllStreams(fake(1));
  const Future future = call(0, 1, "", {onDevice(kLarge, 1)});
  // The sender's block and the receiver's.
  ASSERT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_ + 2; }));
  network_.kill("address 0");
  EXPECT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_; }));
}

TEST_F(DeviceTest, WaitForMemoryEndsWithTheAgent) {
  startWith([&](Message& /*request*/) { return completed(""); }, across_);
  (void)lookOnAllStreams(fake(1));
  const Future future = call(0, 1, "", {onDevice(kLarge, 1)});
  // The sender's block and the receiver's.
  ASSERT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_ + 2; }));
  agent(1).shutdown();
  EXPECT_TRUE(contains(failure(future), "shut down"));
  EXPECT_TRUE(eventually([&] { return device_.blocksInUse() == blocksAtStart_; }));
}

TEST_F(DeviceTest, FailureOfTheReceiversDeviceReachesTheCaller) {
  startWith([&](Message& /*request*/) { return completed(""); }, across_);
  device_.fail(true, 1);
  EXPECT_TRUE(contains(failure(call(0, 1, "", {onDevice(kLarge, 1)})), "illegal memory access"));
  EXPECT_EQ(handled_.load(), 0);
}

TEST_F(DeviceTest, DeviceWithoutMemoryIsNotReportedAsFailed) {
  startWith([&](Message& /*request*/) { return completed(""); }, across_);
  DevicePool::instance().setSource(
      DevicePool::Source::kReplacedTorch, {}, [](const c10::DeviceType&) -> c10::Allocator* {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory is left");
      });
  for (const int64_t elements : {kSmall, kLarge}) { // the decoder copies the first, the second arrives in place
    const std::string what = failure(call(0, 1, "", {onDevice(elements, 1)}));
    EXPECT_TRUE(contains(what, "no memory is left")) << what;
    EXPECT_FALSE(contains(what, "failed")) << what;
  }
  DevicePool::instance().setSource(DevicePool::Source::kTorch);
  (void)answerWhileRunning(call(0, 1, "", {onDevice(kLarge, 1)}));
  EXPECT_EQ(handled_.load(), 1);
}

TEST_F(DeviceTest, FailureOfTheDeviceReachesTheCaller) {
  startWith(
      [&](Message& /*request*/) {
        device_.fail(true); // a kernel of the handler may do this
        return reply({onDevice(kLarge, 1)});
      },
      same_,
      same_);
  EXPECT_TRUE(contains(failure(call(0, 1, "")), "illegal memory access"));
  EXPECT_TRUE(contains(failure(call(0, 1, "", {onDevice(kLarge, 1)})), "illegal memory access"));
}

} // namespace
} // namespace torch_ucx_rpc
