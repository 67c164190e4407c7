#include "messaging/device_watch.h"

#include "memory/device_pool.h"
#include "runtime/worker_mutex.h"

#include <chrono>
#include <memory>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// How often DeviceWatch asks devices whether the work that messages wait for is done. A short kernel takes about as
// long.
constexpr auto kAskPeriod = std::chrono::microseconds(50);

// How often DeviceWatch looks for released device memory whose uses are over.
constexpr auto kCollectionPeriod = std::chrono::milliseconds(100);

} // namespace

DeviceWatch::DeviceWatch(const MessengerParts& parts, const DevicesInUse& devices)
    : MessengerParts(parts),
      devices_(devices),
      askTask_(timer_.add([this](Timer::TimePoint /*now*/) { return ask(); })),
      collectionTask_(timer_.add([this](Timer::TimePoint now) { return collect(now); })) {}

void DeviceWatch::beginRoundWithWorkerLock() {
  assertHoldsWorkerLock();
  makeContextCurrent(devices_.get());
  if (DevicePool::instance().isCollecting() && !collectionTask_.isScheduled()) {
    collectionTask_.dueNow();
  }
}

void DeviceWatch::askAgain() {
  askTask_.dueIn(kAskPeriod);
}

Timer::TimePoint DeviceWatch::ask() {
  progress_.requestStartDeferred(); // asks the devices, and sets this task again if they are not done
  return Timer::kNever;
}

Timer::TimePoint DeviceWatch::collect(Timer::TimePoint now) {
  DevicePool& pool = DevicePool::instance();
  // Not on this thread, since deadlines and new threads wait for it. An allocator may wait for the driver or for
  // Python.
  if (std::shared_ptr<void> hold = pool.statistics().heldBytes != 0 ? lifetime_.hold() : nullptr) {
    executor_.addCompletion([hold = std::move(hold), &pool] { pool.collect(); });
  }
  // Any thread may release memory that is in use now, and no event announces the release.
  return pool.isCollecting() ? now + kCollectionPeriod : Timer::kNever;
}

} // namespace torch_ucx_rpc
