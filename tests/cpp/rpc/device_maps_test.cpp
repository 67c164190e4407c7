// The devices on which tensors arrive.

#include "device_fixture.h"

#include "tensors/gradient_devices.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>

namespace torch_ucx_rpc {
namespace {

class DeviceMapsTest : public DeviceTest {};

TEST_F(DeviceMapsTest, TensorsArriveWhereTheMapSays) {
  const std::vector<DeviceMap> maps = {
      {{fake(0), fake(1)}, {fake(1), fake(0)}},
      {{fake(0), c10::kCPU}, {fake(1), fake(1)}},
      {{c10::kCPU, fake(1)}, {fake(0), fake(0)}, {fake(1), fake(0)}},
      {{c10::kCPU, fake(0)}, {fake(0), fake(0)}, {fake(1), fake(0)}},
      {{c10::kCPU, c10::kCPU}, {fake(0), c10::kCPU}, {fake(1), c10::kCPU}}};
  startWith(keep(), same_);
  for (const DeviceMap& map : maps) {
    agent(0).deviceMaps().set({{"w1", map}}, {}, devices_);
    for (const int64_t elements : {int64_t{0}, kSmall, kLarge}) {
      (void)answerWhileRunning(
          call(0, 1, "", {at::full({elements}, 1.f), onDevice(elements, 2, fake(0)), onDevice(elements, 3, fake(1))}));
      device_.run();
      const std::vector<c10::Device> from{c10::kCPU, fake(0), fake(1)};
      ASSERT_EQ(received_.size(), from.size());
      for (size_t index = 0; index < from.size(); ++index) {
        const auto entry = map.find(from[index]);
        EXPECT_EQ(received_[index].device(), entry != map.end() ? entry->second : from[index]);
        EXPECT_TRUE(isAll(hostView(received_[index]), static_cast<double>(index + 1)));
        EXPECT_EQ(received_[index].numel(), elements);
      }
    }
  }
}

TEST_F(DeviceMapsTest, MapGivenWithARequestReplacesTheWorkersMap) {
  startWith(keep(), same_);
  const Future future = agent(0).send(
      agent(0).getWorkerInfo("w1"),
      makeMessage(MessageType::PYTHON_CALL, "", {onDevice(kLarge, 1)}),
      rpc::kUnsetRpcTimeout,
      {{fake(0), c10::kCPU}});
  (void)answerWhileRunning(future);
  EXPECT_TRUE(received_.at(0).is_cpu());
}

TEST_F(DeviceMapsTest, TensorsThatShareMemoryStillShareIt) {
  startWith(keep(), same_);
  const at::Tensor base = onDevice(kLarge, 1);
  (void)answerWhileRunning(call(0, 1, "", {base, base.narrow(0, 10, 20), onDevice(kLarge, 2, fake(1))}));
  ASSERT_EQ(received_.size(), 3u);
  EXPECT_TRUE(received_[0].is_alias_of(received_[1]));
  EXPECT_EQ(received_[1].storage_offset(), 10);
  EXPECT_EQ(received_[2].device(), fake(1));
}

// The body comes by rendezvous with its spans. So the receiver learns the spans' devices only when they have arrived.
TEST_F(DeviceMapsTest, MessageWithALargeBodyArrivesOnTheDevice) {
  startWith(keep(), same_);
  std::vector<at::Tensor> sent{onDevice(kLarge, 5)};
  for (int number = 0; number < 20; ++number) {
    sent.push_back(tensorOf(30 * kKiB, number));
  }
  (void)answerWhileRunning(call(0, 1, "", sent));
  ASSERT_EQ(received_.size(), sent.size());
  EXPECT_EQ(received_[0].device(), fake());
  EXPECT_TRUE(isAll(hostView(received_[0]), 5));
  EXPECT_TRUE(isAll(received_[20], 19));
}

TEST_F(DeviceMapsTest, DeviceWithoutAnEntryIsRefusedNamingTheWorker) {
  startWith([&](Message& request) { return completed("", request.tensors()); }, {{fake(0), fake(0)}});
  try {
    (void)call(0, 1, "", {onDevice(kSmall, 1, fake(1))});
    ADD_FAILURE() << "was not refused";
  } catch (const c10::Error& error) {
    EXPECT_TRUE(contains(error.what(), "worker 'w1' (rank 1")) << error.what();
    EXPECT_TRUE(contains(error.what(), "privateuseone:1"));
    EXPECT_TRUE(contains(error.what(), "set_device_map"));
    EXPECT_TRUE(contains(error.what(), "Request device mapping is not available"));
  }
  const Future future = call(0, 1, "", {onDevice(kSmall, 1)});
  ASSERT_TRUE(eventually([&] {
    device_.run();
    return future->completed();
  }));
  EXPECT_TRUE(contains(failure(future), "Response device mapping is not available")) << failure(future);
}

TEST_F(DeviceMapsTest, DeviceThatTheReceiverDoesNotUseIsRefused) {
  startWith([&](Message& /*request*/) { return completed(""); }, {{c10::kCPU, fake(1)}});
  agent(1).deviceMaps().set({}, {}, {fake(0)});
  for (const int64_t elements : {kSmall, kLarge}) {
    EXPECT_TRUE(contains(failure(call(0, 1, "", {at::ones({elements})})), "does not use for RPC")) << elements;
  }
  EXPECT_EQ(handled_.load(), 0);
}

TEST_F(DeviceMapsTest, GradientsEndOnTheDevicesOfTheirTensors) {
  namespace autograd = torch::distributed::autograd;
  start(1, echo);
  agent(0).setTypeResolver(
      std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName&) { return c10::StrongTypePtr({}, {}); }));
  rpc::RpcAgent::setCurrentRpcAgent(agents_.at(0));
  autograd::DistAutogradContainer& container = autograd::DistAutogradContainer::init(0);
  const auto context = container.newContext();
  const at::Tensor onCpu = at::ones({kSmall}).set_requires_grad(true);
  at::Tensor there = onDevice(kSmall, 1);
  there.set_requires_grad(true);
  const decltype(context->retrieveSendFunction(0)) send(std::make_unique<autograd::SendRpcBackward>());
  send->set_next_edges(torch::autograd::collect_next_edges(onCpu, there));
  const autograd::AutogradMetadata metadata(context->contextId(), container.newAutogradMessageId());
  context->addSendFunction(send, metadata.autogradMessageId);

  c10::intrusive_ptr<Message> request =
      autograd::PropagateGradientsReq(metadata, {onDevice(kSmall, 2), onDevice(kSmall, 3)}, true).toMessage();
  request->setId(7);
  placeGradients(request);
  const auto placed = autograd::PropagateGradientsReq::fromMessage(*request);
  EXPECT_EQ(request->id(), 7);
  EXPECT_TRUE(placed->retainGraph());
  EXPECT_TRUE(placed->getGrads().at(0).is_cpu());
  EXPECT_EQ(placed->getGrads().at(1).device(), fake());
  EXPECT_TRUE(isAll(placed->getGrads()[0], 2));
  EXPECT_TRUE(isAll(hostView(placed->getGrads()[1]), 3));
  container.releaseContext(context->contextId());
  rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

} // namespace
} // namespace torch_ucx_rpc
