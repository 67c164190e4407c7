// What the passing of time brings about: calls expire, and what has come to a halt is set going again.

#include "agent/agent.h"
#include "agent/message_types.h"
#include "memory/device_pool.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

namespace {

constexpr auto kRepairPeriod = std::chrono::milliseconds(20);

// How often device memory is looked at that has been released and is still used.
constexpr auto kCollectionPeriod = std::chrono::milliseconds(100);

// torch's own words, which programs look for, and whom we called.
std::string timeoutText(std::chrono::milliseconds timeout, const Peer& to) {
  std::string text = rpc::kRpcTimeoutErrorStr;
  text.replace(text.find("{}"), 2, std::to_string(timeout.count()));
  return text + "; called " + to.describe();
}

} // namespace

Timer::Clock::time_point UcxRpcAgent::onTimer(Timer::Clock::time_point now) {
  Timer::Clock::time_point next = expireCalls(now);
  if (isRepairWanted_.load() || isRepairing_.load()) {
    if (now >= repairDue_) {
      repairDue_ = now + kRepairPeriod;
      progress_->submit([this] { repairWithWorkerLock(); });
    }
    next = std::min(next, repairDue_);
  }

  if (isDeviceTimerSet_.exchange(false)) {
    progress_->submit([] {}); // settles, and sets it again if there is still something to wait for
  }
  if (isCollectionTimerSet_.load()) {
    next = std::min(next, collectDeviceMemory(now));
  }
  next = std::min(next, threads_->check(now));
  if (hasHeartbeats_.load()) {
    if (now >= heartbeatDue_) {
      heartbeatDue_ = now + heartbeat_.period();
      progress_->submit([this] { checkHeartbeats(); });
    }
    next = std::min(next, heartbeatDue_);
  }
  next = std::min(next, releaseLeftovers(now));
  return std::min(next, checkWindow(now));
}

Timer::Clock::time_point UcxRpcAgent::collectDeviceMemory(Timer::Clock::time_point now) {
  DevicePool& pool = DevicePool::instance();
  pool.collect();
  // What is in use is released by whoever, of which nobody hears.
  isCollectionTimerSet_.store(pool.isCollecting());
  return isCollectionTimerSet_.load() ? now + kCollectionPeriod : Timer::Clock::time_point::max();
}

Timer::Clock::time_point UcxRpcAgent::expireCalls(Timer::Clock::time_point now) {
  Timer::Clock::time_point next = Timer::Clock::time_point::max();
  std::vector<std::pair<Peer*, uint64_t>> expiredIds;
  for (CallTable::Expired& expired : calls_.takeExpired(now, next)) {
    callsTimedOut_.fetch_add(1, std::memory_order_relaxed);
    Peer& to = *expired.call.to;
    if (to.member().session != session_ && !matters(expired.call.type)) {
      expiredIds.emplace_back(&to, expired.id);
    }
    const std::string what = rpc::makeRPCError(timeoutText(expired.call.timeout, to), rpc::RPCErrorType::TIMEOUT);
    failCallLater(std::move(expired.call), what);
    isRepairWanted_.store(true); // it is also how a worker looks that hears nothing
  }
  if (!expiredIds.empty()) {
    // What the callee has not taken in yet it need not; its handler, once running, is not interrupted. After the failures: this may
    // make progress for others.
    progress_->submit([this, ids = std::move(expiredIds)] {
      for (const auto& [to, id] : ids) {
        if (!outbox_->cancel(*to, id)) {
          sendNowWithWorkerLock(*to, wire::Kind::kCancel, id);
        }
      }
    });
  }
  return next;
}

Timer::Clock::time_point UcxRpcAgent::checkWindow(Timer::Clock::time_point now) {
  if (window_->waitingMessages.load() == 0) {
    isStallTimerSet_.store(false);
    stalledSince_ = {};
    return Timer::Clock::time_point::max();
  }
  progress_->submit([] {}); // settles: what is received slowly must not keep the rest waiting
  const uint64_t releases = window_->releases();
  const auto patience =
      window_->receivingMessages.load() == 0 ? ReceiveWindow::kPatience : ReceiveWindow::kPatienceWhileReceiving;
  if (stalledSince_ == Timer::Clock::time_point{} || releases != stalledReleases_ ||
      threads_->counts().waitingRequests != 0) {
    stalledReleases_ = releases;
    stalledSince_ = now;
  } else if (now - stalledSince_ >= patience) {
    progress_->submit([this] {
      if (!isClosed_.load()) { // the transport may be too
        inbox_->admitStalled();
      }
    });
    stalledSince_ = now;
  }
  return now + ReceiveWindow::kPatience / 2;
}

} // namespace torch_ucx_rpc
