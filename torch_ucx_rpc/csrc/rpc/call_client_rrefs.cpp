// The part of CallClient that ends calls which have not made their RRefs.

#include "rpc/call_client.h"
#include "torch_glue/failed_rref.h"

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Delay of a repeated message about a failed RRef, for an owner that had no room for it.
constexpr auto kFailurePeriod = std::chrono::milliseconds(100);

} // namespace

void CallClient::tellOwner(CallTable::Call call, std::string failure) {
  if (call.failure) { // the owner had no room for it
    sendFailureLater(std::move(call), kFailurePeriod);
    return;
  }
  call.failure = std::move(failure);
  if (!sendFailure(call)) {
    sendFailureLater(std::move(call), kRRefPeriod);
  }
}

bool CallClient::sendFailure(CallTable::Call& call) {
  c10::intrusive_ptr<Message> request = describeFailedRRef(*call.future, *call.failure);
  if (request == nullptr) {
    return false;
  }
  call.deadline = call.end();
  call.eager = {};
  Peer& owner = *call.to;
  begin(std::move(call), encodeMessage(std::move(request), owner, {}, messenger_.transportTo(owner)));
  return true;
}

void CallClient::sendFailureLater(CallTable::Call call, std::chrono::milliseconds delay) {
  const CallTable::Clock::time_point when = std::min(CallTable::Clock::now() + delay, call.end());
  call.deadline = when;
  bool isEarliest = false;
  calls_.open(std::move(call), isEarliest);
  expiryTask_.dueBy(when);
  failAllIfClosed();
}

} // namespace torch_ucx_rpc
