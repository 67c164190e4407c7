// The order in which channels, and the streams of devices, use the memory of tensors.

#include "device_fixture.h"
#include "rpc/channel.h"

#include <future>

namespace torch_ucx_rpc {
namespace {

constexpr milliseconds kPatienceMs(20000);

class ChannelDeviceTest : public DeviceTest {
 protected:
  void startWithMap(const DeviceMap& map) {
    startWith(keep(), map);
    for (const worker_id_t rank : {0, 1}) {
      agent(rank).channel().advance("g", 0);
    }
  }

  std::shared_ptr<Channel::Sent> put(std::vector<at::Tensor> tensors) {
    Peer& to = agent(0).group().peer("w1");
    return agent(0).channel().put(to, {"g", 0, "x"}, {std::move(tensors), false}, kPatienceMs);
  }

  // Takes the value, and launches a kernel on each tensor that notes its content. The kernel's stream runs early.
  std::vector<Look> take(std::optional<std::vector<at::Tensor>> into = {}) {
    std::future<std::vector<Look>> taken = std::async(std::launch::async, [&] {
      const c10::StreamGuard guard(latestStream());
      const c10::StreamGuard second(latestStream(fake(1)));
      Channel& channel = agent(1).channel();
      const auto expected = channel.post(agent(1).group().peer("w0"), {"g", 0, "x"}, into);
      received_ = channel.wait(expected, kPatienceMs).tensors;
      std::vector<Look> looks;
      for (const at::Tensor& tensor : received_) {
        looks.emplace_back(tensor);
      }
      return looks;
    });
    EXPECT_TRUE(eventually([&] {
      device_.run();
      return taken.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }));
    std::vector<Look> looks = taken.get();
    device_.run();
    return looks;
  }
};

TEST_F(ChannelDeviceTest, AValueIsReadWhenItsStreamHasMadeIt) {
  startWithMap(same_);
  for (const int64_t elements : {kSmall, kLarge}) {
    at::Tensor sent = onDevice(elements, 0);
    device_.launch(fake(), [view = hostView(sent)] { view.fill_(7); });
    put({sent});
    sent.reset();
    const std::vector<Look> looks = take();
    ASSERT_EQ(looks.size(), 1u);
    EXPECT_TRUE(looks[0].hasSeen(7)) << elements;
  }
}

TEST_F(ChannelDeviceTest, ReceiversStreamWaitsForTheValue) {
  startWithMap(across_);
  // The receiver's streams still read this memory, so the value is written only when they have run.
  const std::vector<Look> earlier = lookOnAllStreams(fake(1));
  put({onDevice(kLarge, 7), onDevice(kSmall, 8)});
  const std::vector<Look> looks = take();
  ASSERT_EQ(looks.size(), 2u);
  EXPECT_TRUE(looks[0].hasSeen(7));
  EXPECT_TRUE(looks[1].hasSeen(8));
  EXPECT_TRUE(std::all_of(earlier.begin(), earlier.end(), [](const Look& look) { return look.hasSeen(9); }));
}

TEST_F(ChannelDeviceTest, ValuesGoToTheMappedDevice) {
  startWithMap(across_);
  put({onDevice(kSmall, 7), onDevice(kLarge, 8)});
  const std::vector<Look> looks = take();
  ASSERT_EQ(looks.size(), 2u);
  EXPECT_EQ(received_[0].device(), fake(1));
  EXPECT_EQ(received_[1].device(), fake(1));
  EXPECT_TRUE(looks[0].hasSeen(7));
  EXPECT_TRUE(looks[1].hasSeen(8));
}

TEST_F(ChannelDeviceTest, AValueMayHaveTensorsOfTheHostAndOfADevice) {
  startWithMap(same_);
  put({onDevice(kLarge, 7), at::ones({kSmall}), at::ones({kLarge})});
  Channel& channel = agent(1).channel();
  const auto expected = channel.post(agent(1).group().peer("w0"), {"g", 0, "x"}, {});
  received_ = channel.wait(expected, kPatienceMs).tensors;
  ASSERT_EQ(received_.size(), 3u);
  EXPECT_TRUE(isAll(hostView(received_[0]), 7));
  EXPECT_TRUE(received_[1].equal(at::ones({kSmall})));
  EXPECT_TRUE(received_[2].equal(at::ones({kLarge})));
}

TEST_F(ChannelDeviceTest, APostedTensorIsFilledInTheOrderOfItsStream) {
  startWithMap(same_);
  for (const int64_t elements : {kSmall, kLarge}) {
    const at::Tensor into = onDevice(elements, 0);
    put({onDevice(elements, 7)});
    const std::vector<Look> looks = take(std::vector<at::Tensor>{into});
    ASSERT_EQ(looks.size(), 1u);
    EXPECT_TRUE(looks[0].hasSeen(7)) << elements;
    EXPECT_EQ(received_[0].const_data_ptr(), into.const_data_ptr());
    received_.clear();
  }
}

TEST_F(ChannelDeviceTest, ValueOfADeviceWithoutAMapIsRefusedAtOnce) {
  startWithMap({});
  try {
    put({onDevice(kSmall, 7)});
    FAIL() << "the value was put without a map";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("device map"), std::string::npos) << error.what();
  }
}

TEST_F(ChannelDeviceTest, SenderHearsThatItsDeviceFails) {
  startWithMap(same_);
  device_.launch(fake(), [] {}); // makes the value wait for its stream
  const auto sent = put({onDevice(kLarge, 7)});
  device_.fail(true);
  try {
    agent(0).channel().wait(sent);
    FAIL() << "the value was sent although the device fails";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("illegal memory access"), std::string::npos) << error.what();
  }
}

} // namespace
} // namespace torch_ucx_rpc
