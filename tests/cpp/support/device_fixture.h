#pragma once

// Agents whose tensors are on the fake device.

#include "agent_fixture.h"
#include "fake_device.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace torch_ucx_rpc {

inline constexpr int64_t kSmall = 3; // elements of float
inline constexpr int64_t kLarge = 100'000;

inline at::Tensor onDevice(int64_t elements, double value, c10::Device device = fake()) {
  at::Tensor tensor = at::empty({elements}, at::TensorOptions(device).dtype(at::kFloat));
  hostView(tensor).fill_(value);
  return tensor;
}

inline c10::Stream latestStream(c10::Device device = fake()) {
  return c10::Stream(c10::Stream::UNSAFE, device, kPoolStreams);
}

// Notes what a kernel on the current stream finds in a tensor. It does not keep the tensor.
class Look {
 public:
  explicit Look(const at::Tensor& tensor) {
    FakeDevice::instance().launch(tensor.device(), [seen = seen_, view = hostView(tensor)] { *seen = view.clone(); });
  }
  bool hasSeen(double value) const {
    return seen_->defined() && isAll(*seen_, value);
  }

 private:
  std::shared_ptr<at::Tensor> seen_ = std::make_shared<at::Tensor>();
};

class DeviceTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    blocksAtStart_ = device_.blocksInUse();
  }

  void TearDown() override {
    device_.fail(false);
    device_.completeEventsLater(false);
    EXPECT_EQ(network_.mixedRendezvous(), 0u) << "memory of a device on one side only";
    received_.clear();
    AgentTest::TearDown();
    EXPECT_EQ(device_.blocksInUse(), blocksAtStart_) << "memory of the device is leaked";
    device_.run();
  }

  // Two workers with the same maps in both directions, on both devices.
  void startWith(
      const Handler& handler,
      const DeviceMap& requests,
      const DeviceMap& replies = {},
      const AgentOptions& options = {}) {
    const Handler counted = [this, handler](Message& request) {
      handled_.fetch_add(1);
      return handler(request);
    };
    start(2, counted, options);
    for (worker_id_t rank : {0, 1}) {
      agent(rank).deviceMaps().set({{"w0", requests}, {"w1", requests}}, {{"w0", replies}, {"w1", replies}}, devices_);
    }
  }

  // Handlers.
  Handler keep() {
    return [this](Message& request) {
      received_ = request.tensors();
      return completed("");
    };
  }
  static Handler lookAtFirst(std::vector<Look>& looks) {
    return [&looks](Message& request) {
      looks.emplace_back(request.tensors()[0]);
      return completed("");
    };
  }

  Future deviceFuture() const {
    return c10::make_intrusive<JitFuture>(at::AnyClassType::get(), devices_);
  }

  Future reply(std::vector<at::Tensor> tensors) const {
    Future future = deviceFuture();
    complete(future, "", std::move(tensors));
    return future;
  }

  // Runs the device until the answer comes.
  c10::intrusive_ptr<Message> answerWhileRunning(const Future& future) {
    EXPECT_TRUE(eventually([&] {
      device_.run();
      return future->completed();
    }));
    return answer(future);
  }

  // Looks on each stream. So the receiving stream is busy, whichever it is, and gives out memory that is still read.
  static std::vector<Look> lookOnAllStreams(c10::Device device) {
    std::vector<Look> looks;
    for (c10::StreamId stream = 0; stream <= kPoolStreams; ++stream) {
      const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream));
      looks.emplace_back(onDevice(kLarge, 9, device));
    }
    return looks;
  }

  // Makes a call without tensors. When it returns, the driver has checked the waiting messages.
  void exchangeWithoutTensors() {
    const int before = handled_.load();
    (void)answer(call(0, 1, "no tensors"));
    EXPECT_EQ(handled_.load(), before + 1) << "something else was handled too";
  }

  FakeDevice& device_ = FakeDevice::instance();
  const Devices devices_{fake(0), fake(1)};
  const DeviceMap same_{{fake(0), fake(0)}, {fake(1), fake(1)}};
  const DeviceMap across_{{fake(0), fake(1)}}; // only the receiver's device is busy
  std::atomic<int> handled_{0};
  std::vector<at::Tensor> received_;
  size_t blocksAtStart_ = 0;
};

} // namespace torch_ucx_rpc
