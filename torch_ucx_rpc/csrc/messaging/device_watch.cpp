#include "messaging/device_watch.h"

#include "memory/device_pool.h"
#include "runtime/worker_mutex.h"

#include <chrono>
#include <memory>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// How often devices are asked whether work is done that messages wait for. A short kernel takes about as long.
constexpr auto kAskPeriod = std::chrono::microseconds(50);

// How often released device memory is checked for uses that are not over.
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
  // Not on this thread: an allocator may wait for the driver or for Python, and deadlines and new threads wait for this
  // one.
  if (std::shared_ptr<void> hold = pool.statistics().heldBytes != 0 ? lifetime_.hold() : nullptr) {
    executor_.addCompletion([hold = std::move(hold), &pool] { pool.collect(); });
  }
  // Any thread may release memory that is in use now, and no event announces it.
  return pool.isCollecting() ? now + kCollectionPeriod : Timer::kNever;
}

} // namespace torch_ucx_rpc
