#include "rpc/channel.h"

#include "messaging/receive_window.h"
#include "rpc/channel_parts.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace {

RpcFailure timedOut(const Peer& other, const std::string& sentence, std::chrono::milliseconds timeout) {
  const Member& member = other.member();
  return {
      RpcFailure::Kind::kTimedOut,
      sentence,
      {.name = member.name, .rank = member.rank, .host = member.host, .timeout = timeout}};
}

} // namespace

Channel::Channel(const AgentParts& parts, const DeviceMaps& deviceMaps, std::function<void()> whileWaiting)
    : AgentParts(parts),
      deviceMaps_(deviceMaps),
      whileWaiting_(std::move(whileWaiting)),
      grave_(std::make_shared<Grave>()) {}

Channel::~Channel() = default;

// ------------------------------------------------------------------------------------------------------- epochs

RpcFailure Channel::epochEnded(const std::string& who, const std::string& group, std::optional<uint64_t> epoch) const {
  const std::string where = epoch ? "is in epoch " + std::to_string(*epoch) + " of" : "has closed";
  return {
      RpcFailure::Kind::kEpochEnded,
      "worker '" + who + "' " + where + " channel '" + group + "'",
      {.name = who, .group = group, .epoch = epoch}};
}

RpcFailure Channel::shutDownFailure() const {
  return {RpcFailure::Kind::kShutDown, "RPC has been shut down on worker '" + self_.name + "'"};
}

void Channel::checkEpochLocked(const Name& name) const {
  if (lifetime_.isClosed()) {
    throw shutDownFailure(); // the shutdown has closed all groups
  }
  const auto group = groups_.find(name.group);
  if (group == groups_.end() || !group->second.isOpen) {
    throw epochEnded(self_.name, name.group, std::nullopt);
  }
  if (group->second.epoch > name.epoch) {
    throw epochEnded(self_.name, name.group, group->second.epoch);
  }
}

void Channel::advance(const std::string& name, uint64_t epoch) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[name];
    if (group.isOpen && group.epoch > epoch) {
      throw std::invalid_argument(
          "channel '" + name + "' is in epoch " + std::to_string(group.epoch) +
          " on this worker; it cannot go back to " + std::to_string(epoch));
    }
    group.isOpen = true;
    group.epoch = epoch;
    endEpochsLocked(name, group, epoch, epochEnded(self_.name, name, epoch), after);
  }
  carryOut(after);
}

void Channel::advanceAll(const std::string& prefix, uint64_t epoch) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    floors_[prefix] = epoch;
    for (auto& [name, group] : groups_) {
      if (name.starts_with(prefix)) {
        group.epoch = std::max(group.epoch, epoch);
        endEpochsLocked(name, group, epoch, epochEnded(self_.name, name, epoch), after);
      }
    }
    std::erase_if(groups_, [](const auto& entry) { return !entry.second.isOpen && entry.second.slots.empty(); });
  }
  carryOut(after);
}

void Channel::close(const std::string& name) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(name); found != groups_.end()) {
      endEpochsLocked(name, found->second, UINT64_MAX, epochEnded(self_.name, name, std::nullopt), after);
      groups_.erase(found);
    }
    // If all workers open the group again, it may begin with an earlier epoch.
    for (auto& [peer, account] : accounts_) {
      account.refused.erase(name);
    }
  }
  carryOut(after);
}

// ------------------------------------------------------------------------------------------------------ sending

std::shared_ptr<Channel::Sent> Channel::put(
    Peer& to, const Name& name, const Value& value, std::chrono::milliseconds timeout) {
  grave_->empty();
  std::unique_ptr<OutgoingMessage> message = encode(to, name, value);
  const uint64_t bodyBytes = message->body.size() + kOverheadOfValue;
  const uint64_t lentBytes = message->totalBytes() - message->body.size();

  Account* account = nullptr;
  const auto hasRoom = [&] {
    const uint64_t open = account->openBodyBytes.load();
    const uint64_t lent = account->lentBytes.load();
    return (open == 0 || open + bodyBytes <= kOpenBodyBytes) && (lent == 0 || lent + lentBytes <= kLentBytes);
  };
  {
    std::unique_lock lock(mutex_);
    account = &accounts_[&to];
    const auto deadline = deadlineOf(timeout);
    while (!hasRoom() && to.state() == Peer::State::kPresent) { // again, if another thread has taken the room
      lock.unlock();
      const bool isInTime = waitUntil([&] { return hasRoom() || to.state() != Peer::State::kPresent; }, deadline);
      if (!isInTime) {
        throw timedOut(
            to,
            "tag '" + name.tag + "' of channel '" + name.group + "' could not be put within " +
                std::to_string(timeout.count()) + " ms: " + to.describe() + " has not taken " +
                std::to_string(account->openBodyBytes.load() + account->lentBytes.load()) + " bytes sent to it",
            timeout);
      }
      lock.lock();
    }
    checkEpochLocked(name);
    const auto refused = account->refused.find(name.group);
    if (refused != account->refused.end() && refused->second > name.epoch) {
      throw epochEnded(to.member().name, name.group, refused->second);
    }
    account->openBodyBytes.fetch_add(bodyBytes);
    account->lentBytes.fetch_add(lentBytes);
  }
  const uint64_t number = lastNumber_.fetch_add(1) + 1;
  auto sent = std::make_shared<Sent>(to, lentBytes);
  if (lentBytes == 0) {
    sent->isDone.store(true); // the tensors have been copied
  } else {
    const std::lock_guard lock(mutex_);
    sending_.emplace(number, sent);
  }
  // The peer's state is read after the account is charged: a thread that marks the peer gone later finds the charge.
  if (to.state() != Peer::State::kPresent || lifetime_.isClosed()) {
    {
      const std::lock_guard lock(mutex_);
      sending_.erase(number);
    }
    throw to.state() != Peer::State::kPresent ? to.failureOfGone() : shutDownFailure();
  }
  messenger_.post(to, wire::Kind::kPut, number, std::move(message));
  return sent;
}

void Channel::wait(const std::shared_ptr<Sent>& sent) {
  (void)waitUntil([&] { return sent->isDone.load(); }, Clock::time_point::max());
  if (!sent->error) {
    return;
  }
  if (sent->to.state() > Peer::State::kLeaving) {
    throw sent->to.failureOfGone();
  }
  throw sent->to.failureFrom(sent->error, "could not send to " + sent->to.describe() + ": " + sent->error.message());
}

void Channel::onPutSent(Peer& to, uint64_t number, const Error& error) {
  std::shared_ptr<Sent> sent;
  {
    const std::lock_guard lock(mutex_);
    const auto found = sending_.find(number);
    if (found == sending_.end()) {
      return;
    }
    sent = std::move(found->second);
    sending_.erase(found);
    accounts_[&to].lentBytes.fetch_sub(sent->lentBytes);
    sent->error = error;
    sent->isDone.store(true);
  }
  wakeWaiting({});
}

void Channel::onTaken(Peer& from, uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    std::atomic<uint64_t>& open = accounts_[&from].openBodyBytes;
    open.fetch_sub(std::min(bytes, open.load())); // only this function lowers it
  }
  wakeWaiting({});
}

void Channel::onPutRefused(Peer& by, const std::string& group, uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  uint64_t& known = accounts_[&by].refused[group];
  known = std::max(known, epoch);
}

// -------------------------------------------------------------------------------------------------- expecting

std::shared_ptr<Channel::Expected> Channel::post(
    Peer& from, const Name& name, std::optional<std::vector<at::Tensor>> into) {
  grave_->empty();
  auto expected = std::make_shared<Expected>(from, name, std::move(into));
  expect(expected);
  return expected;
}

void Channel::expect(const std::shared_ptr<Expected>& expected) {
  Peer& from = expected->from;
  const Name& name = expected->name;
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    if (expected->isExpected) {
      return;
    }
    checkEpochLocked(name);
    expected->isExpected = true;
    Slot& slot = slotLocked(from, name);
    if (slot.arrivals.empty()) {
      slot.expected.push_back(expected);
    } else {
      const ArrivalPtr arrival = std::move(slot.arrivals.front());
      slot.arrivals.pop_front();
      forgetIfEmptyLocked(from, name);
      matchLocked(arrival, expected, after);
    }
  }
  // The peer's state is read after `expected` is in its slot: a thread that marks the peer gone later finds it there.
  if (!from.isThere()) {
    onPeerGone(from);
  }
  carryOut(after);
}

Channel::Value Channel::wait(const std::shared_ptr<Expected>& expected, std::chrono::milliseconds timeout) {
  if (!expected->isDone.load()) {
    expect(expected); // again, if an earlier wait has timed out
  }
  if (!waitUntil([&] { return expected->isDone.load(); }, deadlineOf(timeout))) {
    cancel(expected);
    if (!expected->isDone.load()) {
      throw timedOut(
          expected->from,
          "no value has come from " + expected->from.describe() + " under tag '" + expected->name.tag +
              "' of channel '" + expected->name.group + "' (epoch " + std::to_string(expected->name.epoch) +
              ") within " + std::to_string(timeout.count()) + " ms",
          timeout);
    }
  }
  if (expected->failure) {
    throw *expected->failure; // NOLINT(cert-err09-cpp,cert-err61-cpp): a copy, since another thread may wait too
  }
  if (expected->isTaken.exchange(true)) {
    throw std::runtime_error(
        "the value under tag '" + expected->name.tag + "' from worker '" + expected->from.member().name +
        "' has been taken: wait() returns it once");
  }
  Value value = decode(*expected);
  taken_.fetch_add(1, std::memory_order_relaxed);
  grave_->empty();
  return value;
}

void Channel::cancel(const std::shared_ptr<Expected>& expected) {
  const std::lock_guard lock(mutex_);
  if (expected->isDone.load() || !expected->isExpected) {
    return;
  }
  expected->isExpected = false;
  const Name& name = expected->name;
  if (!expected->isMatched) {
    std::erase(slotLocked(expected->from, name).expected, expected);
    forgetIfEmptyLocked(expected->from, name);
    return;
  }
  for (const auto& [number, arrival] : underWay_) {
    if (arrival->expected == expected) {
      arrival->expected = nullptr;
      if (arrival->state == Arrival::State::kDropped) {
        break;
      }
      // The next wait for this value gets it. There may be one already.
      if (const ExpectedPtr next = takeExpectedLocked(expected->from, {name.group, name.epoch, name.tag})) {
        next->isInOthersMemory = arrival->isInOthersMemory;
        next->isMatched = true;
        arrival->expected = next;
      } else {
        slotLocked(expected->from, name).arrivals.push_front(arrival);
      }
    }
  }
  expected->isMatched = false;
}

// ------------------------------------------------------------------------------------------------------- waiting

Channel::Clock::time_point Channel::deadlineOf(std::chrono::milliseconds timeout) {
  return timeout.count() == 0 ? Clock::time_point::max() : Clock::now() + timeout;
}

template <typename IsDone>
bool Channel::waitUntil(const IsDone& isDone, Clock::time_point deadline) {
  if (isDone()) {
    return true;
  }
  // A handler may wait long here. Until it goes on, another request may run in its place, and other messages may use
  // its share of the receive window.
  const std::shared_ptr<void> nesting = Executor::markBlocked();
  HandlingScope::releaseInnermost();
  const auto isOver = [&] { return isDone() || lifetime_.isClosed() || Clock::now() >= deadline; };
  while (!isDone()) {
    if (lifetime_.isClosed()) {
      throw shutDownFailure();
    }
    if (Clock::now() >= deadline) {
      return false;
    }
    if (!messenger_.progress().driveUntil(isOver, std::nullopt, deadline)) { // another caller drives
      std::unique_lock lock(mutex_);
      changed_.wait_until(lock, std::min(Clock::now() + kSignalCheckPeriod, deadline), isOver);
    }
    if (!isDone()) {
      whileWaiting_(); // a signal may have come in
    }
  }
  return true;
}

void Channel::wakeWaiting(const std::optional<Driver>& driver) {
  changed_.notify_all();
  if (!driver || driver->role != Role::kWaitingCaller) { // a waiting caller that drives checks its own wait
    messenger_.progress().wakeWaitingCaller();
  }
}

void Channel::carryOut(Aftermath& after) {
  for (auto& [to, frame] : after.frames) {
    if (to->isThere() && to->member().session != self_.session) {
      messenger_.postControl(*to, std::move(frame));
    } else if (frame.kind == wire::Kind::kTaken) {
      onTaken(*to, frame.callId);
    }
  }
  for (Aftermath::Receive& receive : after.receives) {
    messenger_.receivePut(*receive.from, receive.number, std::move(receive.into));
  }
  for (const auto& [from, number] : after.drops) {
    messenger_.dropPut(*from, number);
  }
  if (after.mustWake) {
    wakeWaiting({});
  }
}

void Channel::shutDown() {
  std::unordered_map<std::string, Group> dead; // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    dead.swap(groups_);
    held_.clear();
  }
  wakeWaiting({});
  grave_->empty();
}

Channel::Counts Channel::counts() const {
  const std::lock_guard lock(mutex_);
  return {lastNumber_.load(), taken_.load(std::memory_order_relaxed), untakenBytes_};
}

} // namespace torch_ucx_rpc
