// The part of Channel that takes in values, and matches them with the waits for them.

#include "rpc/channel_parts.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Number of taken bytes after which a receiver reports them.
constexpr uint64_t kOwedBytes = Channel::kOpenBodyBytes / 4;

std::string keyOf(const Peer& from, std::string_view tag) {
  const uint64_t session = from.member().session;
  std::string key(reinterpret_cast<const char*>(&session), sizeof(session));
  return key.append(tag);
}

} // namespace

// ---------------------------------------------------------------------------------------------------- arriving

Channel::Verdict Channel::onPutAnnounced(
    Peer& from, const wire::Header& header, std::span<const std::byte> body, std::span<const uint64_t> spanBytes) {
  wire::PutName name;
  size_t bodyBytes = 0;
  if (wire::readPutName(body, name, bodyBytes)) {
    return {Verdict::Fate::kDrop, {}};
  }
  const std::lock_guard lock(mutex_);
  if (laterEpochLocked(name)) {
    return {Verdict::Fate::kDrop, {}};
  }
  const auto arrival = std::make_shared<Arrival>(from, header.callId, name, body.size(), Arrival::State::kReceiving);
  if (!underWay_.emplace(Number(&from, header.callId), arrival).second) {
    return {Verdict::Fate::kDrop, {}}; // this number is under way already: no worker of this package uses one twice
  }
  if ((arrival->expected = takeExpectedLocked(from, name))) {
    arrival->expected->isMatched = true;
    std::vector<c10::DataPtr> into = memoryIn(*arrival->expected, body.first(bodyBytes), spanBytes);
    arrival->isInOthersMemory = !into.empty();
    return {Verdict::Fate::kReceive, std::move(into)};
  }
  slotLocked(from, arrival->name).arrivals.push_back(arrival);
  const uint64_t bytes = std::accumulate(spanBytes.begin(), spanBytes.end(), uint64_t{0});
  arrival->untakenBytes = bytes;
  if (untakenBytes_ == 0 || untakenBytes_ + bytes <= kUntakenBytes) {
    untakenBytes_ += bytes;
    return {Verdict::Fate::kReceive, {}};
  }
  arrival->state = Arrival::State::kHeld;
  arrival->body = Bytes(body.first(bodyBytes));
  arrival->spanBytes.assign(spanBytes.begin(), spanBytes.end());
  held_.push_back(arrival);
  return {Verdict::Fate::kHold, {}};
}

void Channel::onPut(IncomingMessage message, const std::optional<Driver>& driver) {
  Peer& from = *message.from;
  wire::PutName name;
  size_t bodyBytes = 0;
  if (wire::readPutName(message.eagerBody, name, bodyBytes)) {
    return; // no worker of this package sends such a message
  }
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    ArrivalPtr arrival;
    if (auto found = underWay_.extract(Number(&from, message.header.callId))) {
      arrival = std::move(found.mapped());
    }
    const std::optional<uint64_t> later = laterEpochLocked(name);
    const bool isDropped = (arrival && arrival->state == Arrival::State::kDropped) ||
        message.header.spanCount != message.spans.size(); // onPutAnnounced() has dropped it
    if (later || isDropped) {
      if (later) {
        after.frames.emplace_back(&from, putRefused(name.group, *later));
      }
      addOwedLocked(from, message.eagerBody.size(), after);
      if (arrival && arrival->expected) {
        failLocked(
            arrival->expected, arrival->failure.value_or(epochEnded(self_.name, std::string(name.group), later)));
        after.mustWake = true;
      }
    } else if (arrival && !arrival->expected) {
      arrival->state = Arrival::State::kHere;
      arrival->message = std::move(message);
    } else if (const ExpectedPtr expected = arrival ? arrival->expected : takeExpectedLocked(from, name)) {
      addOwedLocked(from, message.eagerBody.size(), after);
      expected->message = std::move(message);
      expected->isDone.store(true);
      after.mustWake = true;
    } else {
      arrival =
          std::make_shared<Arrival>(from, message.header.callId, name, message.eagerBody.size(), Arrival::State::kHere);
      slotLocked(from, arrival->name).arrivals.push_back(arrival);
      arrival->message = std::move(message);
    }
  }
  if (std::exchange(after.mustWake, false)) {
    wakeWaiting(driver);
  }
  carryOut(after);
}

void Channel::onPutRejected(Peer& from, uint64_t number, const Error& why) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    auto found = underWay_.extract(Number(&from, number));
    if (!found) {
      return;
    }
    const ArrivalPtr arrival = std::move(found.mapped());
    addOwedLocked(from, arrival->bodyBytes, after);
    if (arrival->expected) {
      failLocked(
          arrival->expected,
          arrival->failure      ? *arrival->failure
              : !from.isThere() ? from.failureOfGone()
                                : from.failureFrom(
                                      why,
                                      "could not receive the value under tag '" + arrival->name.tag + "' from " +
                                          from.describe() + ": " + why.message()));
      after.mustWake = true;
    } else if (arrival->state == Arrival::State::kReceiving) {
      std::erase(slotLocked(from, arrival->name).arrivals, arrival);
      forgetIfEmptyLocked(from, arrival->name);
      freeUntakenLocked(arrival->untakenBytes, after);
    }
  }
  carryOut(after);
}

void Channel::onPeerGone(Peer& peer) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    const RpcFailure gone = peer.failureOfGone();
    const std::string prefix = keyOf(peer, "");
    for (auto& [groupName, group] : groups_) {
      for (auto& [epoch, slots] : group.slots) {
        for (auto& [key, slot] : slots) {
          if (!key.starts_with(prefix)) {
            continue;
          }
          for (const ExpectedPtr& expected : std::exchange(slot.expected, {})) {
            failLocked(expected, gone);
          }
          // A value that is here has come before the end, and counts. The inbox drops values that are held or being
          // received.
          std::erase_if(slot.arrivals, [&](const ArrivalPtr& arrival) {
            const bool isLost = arrival->state != Arrival::State::kHere;
            if (isLost) {
              dropLocked(arrival, after);
            }
            return isLost;
          });
        }
        std::erase_if(
            slots, [](const auto& entry) { return entry.second.expected.empty() && entry.second.arrivals.empty(); });
      }
    }
    after.mustWake = true; // put() may wait for room there
  }
  carryOut(after);
}

// ------------------------------------------------------------------------------------------------------ the slots

std::optional<uint64_t> Channel::laterEpochLocked(const wire::PutName& name) const {
  const auto group = groups_.find(std::string(name.group));
  uint64_t epoch = group != groups_.end() && group->second.isOpen ? group->second.epoch : 0;
  for (const auto& [prefix, floor] : floors_) {
    epoch = name.group.starts_with(prefix) ? std::max(epoch, floor) : epoch;
  }
  return epoch > name.epoch ? std::optional(epoch) : std::nullopt;
}

Channel::Slot& Channel::slotLocked(const Peer& from, const Name& name) {
  return groups_[name.group].slots[name.epoch][keyOf(from, name.tag)];
}

void Channel::forgetIfEmptyLocked(const Peer& from, const Name& name) {
  auto& slots = groups_[name.group].slots[name.epoch];
  const auto slot = slots.find(keyOf(from, name.tag));
  if (slot != slots.end() && slot->second.arrivals.empty() && slot->second.expected.empty()) {
    slots.erase(slot);
  }
}

Channel::ExpectedPtr Channel::takeExpectedLocked(const Peer& from, const wire::PutName& name) {
  const auto group = groups_.find(std::string(name.group));
  if (group == groups_.end()) {
    return nullptr;
  }
  const auto slots = group->second.slots.find(name.epoch);
  if (slots == group->second.slots.end()) {
    return nullptr;
  }
  const auto slot = slots->second.find(keyOf(from, name.tag));
  if (slot == slots->second.end() || slot->second.expected.empty()) {
    return nullptr;
  }
  ExpectedPtr expected = std::move(slot->second.expected.front());
  slot->second.expected.pop_front();
  if (slot->second.expected.empty() && slot->second.arrivals.empty()) {
    slots->second.erase(slot);
  }
  return expected;
}

void Channel::matchLocked(const ArrivalPtr& arrival, const ExpectedPtr& expected, Aftermath& after) {
  expected->isInOthersMemory = arrival->isInOthersMemory;
  switch (arrival->state) {
    case Arrival::State::kHere:
      expected->message = std::move(arrival->message);
      expected->isDone.store(true);
      addOwedLocked(arrival->from, arrival->bodyBytes, after);
      freeUntakenLocked(arrival->untakenBytes, after);
      after.mustWake = true;
      return;
    case Arrival::State::kHeld: {
      std::vector<c10::DataPtr> into = memoryIn(*expected, arrival->body, arrival->spanBytes);
      arrival->isInOthersMemory = !into.empty();
      held_.remove(arrival);
      arrival->state = Arrival::State::kReceiving;
      arrival->untakenBytes = 0; // now expected, so it never counts
      after.receives.push_back({&arrival->from, arrival->number, std::move(into)});
      break;
    }
    default:
      freeUntakenLocked(std::exchange(arrival->untakenBytes, 0), after);
  }
  arrival->expected = expected;
  expected->isMatched = true;
}

void Channel::dropLocked(const ArrivalPtr& arrival, Aftermath& after) {
  after.dead.push_back(arrival);
  if (arrival->state == Arrival::State::kReceiving) { // onPut() or onPutRejected() does the rest
    arrival->state = Arrival::State::kDropped;
    freeUntakenLocked(std::exchange(arrival->untakenBytes, 0), after);
    return;
  }
  if (arrival->state == Arrival::State::kHeld) {
    held_.remove(arrival);
    underWay_.erase(Number(&arrival->from, arrival->number));
    after.drops.emplace_back(&arrival->from, arrival->number);
  } else {
    freeUntakenLocked(arrival->untakenBytes, after);
  }
  addOwedLocked(arrival->from, arrival->bodyBytes, after);
}

void Channel::failLocked(const ExpectedPtr& expected, const RpcFailure& why) {
  expected->failure = why;
  expected->isDone.store(true);
}

void Channel::addOwedLocked(Peer& from, uint64_t bodyBytes, Aftermath& after) {
  uint64_t& owed = accounts_[&from].owedBytes;
  owed += bodyBytes + kOverheadOfValue;
  if (owed >= kOwedBytes) {
    after.frames.emplace_back(&from, ControlFrame{wire::Kind::kTaken, std::exchange(owed, 0), {}});
  }
}

void Channel::freeUntakenLocked(uint64_t bytes, Aftermath& after) {
  untakenBytes_ -= bytes;
  while (!held_.empty() && (untakenBytes_ == 0 || untakenBytes_ + held_.front()->untakenBytes <= kUntakenBytes)) {
    const ArrivalPtr arrival = std::move(held_.front());
    held_.pop_front();
    untakenBytes_ += arrival->untakenBytes;
    arrival->state = Arrival::State::kReceiving;
    after.receives.push_back({&arrival->from, arrival->number, {}});
  }
}

void Channel::endEpochsLocked(
    const std::string& name, Group& group, uint64_t before, const RpcFailure& why, Aftermath& after) {
  const auto end = group.slots.lower_bound(before);
  std::set<Peer*> senders; // of dropped values; each sender gets one report
  for (auto epoch = group.slots.begin(); epoch != end; ++epoch) {
    for (auto& [key, slot] : epoch->second) {
      for (const ExpectedPtr& expected : slot.expected) {
        failLocked(expected, why);
      }
      for (const ArrivalPtr& arrival : slot.arrivals) {
        dropLocked(arrival, after);
        senders.insert(&arrival->from);
      }
    }
  }
  if (const std::optional<uint64_t> now = why.details().epoch) {
    for (Peer* sender : senders) {
      after.frames.emplace_back(sender, putRefused(name, *now));
    }
  }
  group.slots.erase(group.slots.begin(), end);
  // Values that are being received for waits of these epochs are dropped when they come. A wait for a value in posted
  // tensors ends only then, because the caller that gets the failure may use the tensors again.
  for (const auto& [number, arrival] : underWay_) {
    if (arrival->expected && arrival->name.epoch < before && arrival->name.group == name) {
      arrival->state = Arrival::State::kDropped;
      if (arrival->isInOthersMemory) {
        arrival->failure = why;
      } else {
        failLocked(std::exchange(arrival->expected, nullptr), why);
      }
    }
  }
  after.mustWake = true;
}

} // namespace torch_ucx_rpc
