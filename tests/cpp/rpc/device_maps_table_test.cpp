// The table that says on which devices of other workers tensors arrive.

#include "rpc/device_maps.h"

#include "base/warnings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

const c10::Device kFirst(c10::DeviceType::CUDA, 0);
const c10::Device kSecond(c10::DeviceType::CUDA, 1);

TEST(DeviceMapsTableTest, WithoutMapsTensorsStayWhereTheyAre) {
  const DeviceMaps maps;
  EXPECT_FALSE(maps.hasAny());
  EXPECT_TRUE(maps.forRequestsTo("w1").empty());
  EXPECT_TRUE(maps.forAnswersTo("w1").empty());
  EXPECT_TRUE(maps.devices().empty());
  EXPECT_TRUE(maps.devicesInUse().get().empty());
}

TEST(DeviceMapsTableTest, RequestsAndAnswersHaveAMapForEachWorker) {
  DeviceMaps maps;
  maps.set({{"w1", {{kFirst, kSecond}}}}, {{"w2", {{kSecond, kFirst}}}}, {kFirst, kSecond});
  EXPECT_TRUE(maps.hasAny());
  EXPECT_EQ(maps.forRequestsTo("w1"), (DeviceMap{{kFirst, kSecond}}));
  EXPECT_TRUE(maps.forRequestsTo("w2").empty());
  EXPECT_EQ(maps.forAnswersTo("w2"), (DeviceMap{{kSecond, kFirst}}));
  EXPECT_TRUE(maps.forAnswersTo("w1").empty());
  EXPECT_TRUE(maps.forRequestsTo("a stranger").empty());
}

TEST(DeviceMapsTableTest, MapsOfOneDirectionAreEnough) {
  DeviceMaps maps;
  maps.set({}, {{"w1", {{kFirst, kSecond}}}}, {kFirst});
  EXPECT_TRUE(maps.hasAny());
  EXPECT_EQ(maps.forAnswersTo("w1"), (DeviceMap{{kFirst, kSecond}}));
}

TEST(DeviceMapsTableTest, NewMapsReplaceTheOldOnes) {
  DeviceMaps maps;
  maps.set({{"w1", {{kFirst, kSecond}}}}, {}, {kFirst});
  maps.set({{"w2", {{kFirst, kFirst}}}}, {}, {kFirst});
  EXPECT_TRUE(maps.forRequestsTo("w1").empty());
  EXPECT_EQ(maps.forRequestsTo("w2"), (DeviceMap{{kFirst, kFirst}}));
  maps.set({}, {}, {});
  EXPECT_FALSE(maps.hasAny());
  EXPECT_TRUE(maps.forRequestsTo("w2").empty());
  EXPECT_TRUE(maps.devices().empty());
}

TEST(DeviceMapsTableTest, ListOfDevicesThatWasReadStaysAsItWas) {
  DeviceMaps maps;
  maps.set({}, {}, {kFirst});
  const Devices& before = maps.devices();
  maps.set({}, {}, {kFirst, kSecond});
  EXPECT_EQ(before, Devices{kFirst}) << "futures refer to it";
  EXPECT_EQ(maps.devices(), (Devices{kFirst, kSecond}));
  EXPECT_EQ(&maps.devicesInUse().get(), &maps.devices());
}

TEST(DeviceMapsTableTest, DevicesCopiedThroughTheHostCauseOneWarning) {
  std::vector<std::string> warnings;
  setWarningReceiver([&](const std::string& sentence) { warnings.push_back(sentence); });
  DeviceMaps maps(0, {ErrorCode::kDeviceFailed, "UCX has no CUDA"});
  maps.set({}, {}, {});
  flushWarnings();
  EXPECT_TRUE(warnings.empty()) << "there are no devices";
  maps.set({}, {}, {kFirst});
  maps.set({}, {}, {kFirst, kSecond});
  DeviceMaps shared;
  shared.set({}, {}, {kFirst});
  flushWarnings();
  setWarningReceiver({});
  EXPECT_EQ(
      warnings,
      std::vector<std::string>{
          "tensors on devices are copied through the host's memory, which is slower. UCX has no CUDA"});
}

} // namespace
} // namespace torch_ucx_rpc
