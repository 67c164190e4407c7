#include "rpc/channel.h"

#include "messaging/receive_window.h"
#include "tensors/tensor_codec.h"
#include "wire/body.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using rpc::JitFuture;

// ---------------------------------------------------------------------------------------------------- the parts

// Tensors that were posted, after the transport is done with them. They must not die under the worker lock, since that
// may run Python.
class Channel::Grave {
 public:
  void add(at::Tensor tensor) {
    const std::lock_guard lock(mutex_);
    tensors_.push_back(std::move(tensor));
    isEmpty_.store(false);
  }
  void empty() {
    if (isEmpty_.load()) {
      return;
    }
    std::vector<at::Tensor> dead;
    const std::lock_guard lock(mutex_);
    dead.swap(tensors_);
    isEmpty_.store(true);
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> tensors_; // guarded by mutex_
  std::atomic<bool> isEmpty_{true};
};

class Channel::Sent {
 public:
  explicit Sent(Peer& to, uint64_t lentBytes) : to(to), lentBytes(lentBytes) {}

  Peer& to;
  const uint64_t lentBytes;
  Error error; // constant once isDone
  std::atomic<bool> isDone{false};
};

class Channel::Expected {
 public:
  Expected(Peer& from, Name name, std::optional<std::vector<at::Tensor>> into)
      : from(from), name(std::move(name)), into(std::move(into)) {}

  Peer& from;
  const Name name;
  const std::optional<std::vector<at::Tensor>> into;
  // Guarded by the channel's mutex until isDone:
  bool isMatched = false; // with a value that is being received
  IncomingMessage message;
  bool isInOthersMemory = false; // the message is in tensors that were posted for another one
  std::optional<RpcFailure> failure;
  std::atomic<bool> isDone{false};
};

// A value in its slot, or on its way to what expects it.
struct Channel::Arrival {
  enum class State : uint8_t {
    kHeld, // its spans wait at the sender
    kReceiving, // until onPut() or onPutRejected()
    kHere,
    kDropped, // while it was being received
  };

  Arrival(Peer& from, uint64_t number, const wire::PutName& name, uint64_t bodyBytes, State state)
      : from(from),
        number(number),
        name{std::string(name.group), name.epoch, std::string(name.tag)},
        bodyBytes(bodyBytes),
        state(state) {}

  Peer& from;
  const uint64_t number;
  const Name name;
  const uint64_t bodyBytes;
  // Guarded by the channel's mutex:
  State state;
  Bytes body; // while it is held: memory is chosen by it
  std::vector<uint64_t> spanBytes; // likewise
  uint64_t untakenBytes = 0; // its part of kUntakenBytes
  bool isInOthersMemory = false; // in tensors that were posted
  IncomingMessage message; // once it is here
  ExpectedPtr expected; // while it is being received for it
};

struct Channel::Aftermath {
  std::vector<std::pair<Peer*, ControlFrame>> frames;
  struct Receive {
    Peer* from;
    uint64_t number;
    std::vector<c10::DataPtr> into;
  };
  std::vector<Receive> receives;
  std::vector<std::pair<Peer*, uint64_t>> drops;
  std::vector<ArrivalPtr> dead;
  bool mustWake = false;
};

namespace {

// What a value costs its receiver beside its small tensors.
constexpr uint64_t kOverhead = 512;
// A receiver says what it has taken when it is this much.
constexpr uint64_t kOwedBytes = Channel::kOpenBodyBytes / 4;
constexpr auto kValueType = rpc::MessageType::UNKNOWN;

std::string keyOf(const Peer& from, std::string_view tag) {
  const uint64_t session = from.member().session;
  std::string key(reinterpret_cast<const char*>(&session), sizeof(session));
  return key.append(tag);
}

// A body of the value that is too large to come along, until the receiver has fetched it.
class BodyLender final : public Lender {
 public:
  BodyLender(Bytes body, std::unique_ptr<Lender> rest) : body_(std::move(body)), rest_(std::move(rest)) {}
  bool mayRunUserCode() const override {
    return rest_ != nullptr && rest_->mayRunUserCode();
  }
  std::span<const std::byte> body() const {
    return body_;
  }

 private:
  const Bytes body_;
  const std::unique_ptr<Lender> rest_;
};

void moveBodyIntoSpan(OutgoingMessage& message) {
  TORCH_CHECK(
      std::ranges::all_of(message.spans, [](const OutgoingMessage::Span& span) { return span.from.is_cpu(); }),
      "a value has too many small tensors on the CPU beside tensors on devices: put them under tags of their own");
  wire::BodyWriter placeholder(static_cast<uint32_t>(kValueType));
  placeholder.setPayloadSpan(message.body.size(), static_cast<uint32_t>(message.spans.size()));
  auto lender = std::make_unique<BodyLender>(std::move(message.body), std::move(message.lender));
  message.spans.push_back({lender->body()});
  message.lender = std::move(lender);
  message.body = placeholder.finish();
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  for (const at::Tensor& tensor : tensors) {
    text << (text.tellp() == 0 ? "" : ", ") << tensor.sizes() << " " << tensor.scalar_type();
  }
  return tensors.empty() ? "no tensors" : text.str();
}

bool isContiguousOnHost(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() && tensor.is_contiguous();
}

} // namespace

Channel::Channel(const AgentParts& parts, const DeviceMaps& deviceMaps, std::function<void()> whileWaiting)
    : self_(parts.self),
      messenger_(parts.messenger),
      lifetime_(parts.lifetime),
      deviceMaps_(deviceMaps),
      whileWaiting_(std::move(whileWaiting)),
      grave_(std::make_shared<Grave>()) {}

Channel::~Channel() = default;

// ------------------------------------------------------------------------------------------------------- epochs

RpcFailure Channel::epochEnded(
    const std::string& who, const std::string& group, std::optional<uint64_t> epoch) const {
  RpcFailure::Details details;
  details.name = who;
  details.group = group;
  details.epoch = epoch;
  const std::string where = epoch ? "is in epoch " + std::to_string(*epoch) + " of" : "has closed";
  return {RpcFailure::Kind::kEpochEnded, "worker '" + who + "' " + where + " channel '" + group + "'", details};
}

RpcFailure Channel::shutDownFailure() const {
  return {RpcFailure::Kind::kShutDown, "RPC has been shut down on worker '" + self_.name + "'"};
}

void Channel::checkEpochLocked(const Name& name) const {
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

void Channel::close(const std::string& name) {
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(name); found != groups_.end()) {
      endEpochsLocked(name, found->second, UINT64_MAX, epochEnded(self_.name, name, std::nullopt), after);
      groups_.erase(found);
    }
  }
  carryOut(after);
}

void Channel::endEpochsLocked(
    const std::string& name, Group& group, uint64_t before, const RpcFailure& why, Aftermath& after) {
  const auto end = group.slots.lower_bound(before);
  for (auto epoch = group.slots.begin(); epoch != end; ++epoch) {
    for (auto& [key, slot] : epoch->second) {
      for (const ExpectedPtr& expected : slot.expected) {
        failLocked(expected, why);
      }
      for (const ArrivalPtr& arrival : slot.arrivals) {
        dropLocked(arrival, after);
      }
    }
  }
  group.slots.erase(group.slots.begin(), end);
  // Values that are being received for waits of these epochs are dropped when they come.
  for (const auto& [number, arrival] : underWay_) {
    if (arrival->expected && arrival->name.epoch < before && arrival->name.group == name) {
      failLocked(std::exchange(arrival->expected, nullptr), why);
      arrival->state = Arrival::State::kDropped;
    }
  }
  after.mustWake = true;
}

// ------------------------------------------------------------------------------------------------------ sending

std::shared_ptr<Channel::Sent> Channel::put(
    Peer& to, const Name& name, const Value& value, std::chrono::milliseconds timeout) {
  grave_->empty();
  std::unique_ptr<OutgoingMessage> message = encodeMessage(
      c10::make_intrusive<rpc::Message>(std::vector<char>(), std::vector<at::Tensor>(value.tensors), kValueType),
      to,
      deviceMaps_.forRequestsTo(to.member().name),
      messenger_.transportTo(to));
  uint32_t flags = value.isSingle ? uint32_t{wire::kSingle} : 0;
  if (message->body.size() + name.group.size() + name.tag.size() + sizeof(wire::PutTrailer) >
      OutgoingMessage::kEagerBodyBytes) {
    moveBodyIntoSpan(*message);
    flags |= wire::kBodyInSpan;
  }
  wire::appendPutName(message->body, {name.group, name.epoch, name.tag, flags});
  const uint64_t bodyBytes = message->body.size() + kOverhead;
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
    if (!hasRoom() && to.state() == Peer::State::kPresent) {
      lock.unlock();
      const bool isInTime =
          waitUntil([&] { return hasRoom() || to.state() != Peer::State::kPresent; }, deadlineOf(timeout));
      if (!isInTime) {
        throw to.failure(
            RpcFailure::Kind::kTimedOut,
            "tag '" + name.tag + "' of channel '" + name.group + "' could not be put within " +
                std::to_string(timeout.count()) + " ms: " + to.describe() + " has not taken " +
                std::to_string(account->openBodyBytes.load() + account->lentBytes.load()) + " bytes of this worker's");
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
    sent->isDone.store(true); // its tensors have been copied
  } else {
    const std::lock_guard lock(mutex_);
    sending_.emplace(number, sent);
  }
  // Read after the account is charged: a thread that marks the peer gone later finds the charge.
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
  throw sent->to.failureFrom(
      sent->error, "could not send to " + sent->to.describe() + ": " + sent->error.message());
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
  Aftermath after;
  {
    const std::lock_guard lock(mutex_);
    checkEpochLocked(name);
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
  // Read after it is in its slot: a thread that marks the peer gone later finds it there.
  if (!from.isThere()) {
    onPeerGone(from);
  }
  carryOut(after);
  return expected;
}

Channel::Value Channel::wait(const std::shared_ptr<Expected>& expected, std::chrono::milliseconds timeout) {
  if (!waitUntil([&] { return expected->isDone.load(); }, deadlineOf(timeout))) {
    cancel(expected);
    if (!expected->isDone.load()) {
      throw expected->from.failure(
          RpcFailure::Kind::kTimedOut,
          "no value has come from " + expected->from.describe() + " under tag '" + expected->name.tag +
              "' of channel '" + expected->name.group + "' (epoch " + std::to_string(expected->name.epoch) +
              ") within " + std::to_string(timeout.count()) + " ms");
    }
  }
  if (expected->failure) {
    throw *expected->failure; // NOLINT(cert-err09-cpp,cert-err61-cpp): a copy, since another thread may wait too
  }
  Value value = decode(*expected);
  taken_.fetch_add(1, std::memory_order_relaxed);
  grave_->empty();
  return value;
}

void Channel::cancel(const std::shared_ptr<Expected>& expected) {
  const std::lock_guard lock(mutex_);
  if (expected->isDone.load()) {
    return;
  }
  const Name& name = expected->name;
  if (!expected->isMatched) {
    std::erase(slotLocked(expected->from, name).expected, expected);
    forgetIfEmptyLocked(expected->from, name);
    return;
  }
  for (const auto& [number, arrival] : underWay_) {
    if (arrival->expected == expected) {
      arrival->expected = nullptr; // the next one that expects the value gets it
      slotLocked(expected->from, name).arrivals.push_front(arrival);
    }
  }
  expected->isMatched = false;
}

// A value that fits what was posted lies in it already, where it was large.
Channel::Value Channel::decode(Expected& expected) {
  IncomingMessage message = std::move(expected.message);
  Peer& from = expected.from;
  const auto unreadable = [&](const Error& error) {
    return from.failureFrom(
        error,
        "the value of " + from.describe() + " under tag '" + expected.name.tag + "' is unreadable: " + error.message());
  };
  if (const Error error = messenger_.checkContent(message)) {
    throw unreadable(error);
  }
  wire::PutName name;
  size_t bodyBytes = 0;
  (void)wire::readPutName(message.eagerBody, name, bodyBytes); // onPut() has checked it
  const uint32_t flags = name.flags;
  message.eagerBody.resizeUninitialized(bodyBytes);
  if ((flags & wire::kBodyInSpan) != 0 && !message.spans.empty()) {
    message.pooledBodyBytes = message.spans.back().bytes;
    message.pooledBody = std::move(message.spans.back().data);
    message.spans.pop_back();
  }

  DecodedMessage decoded;
  const Devices& devices = deviceMaps_.devices();
  try {
    const Streams streams = deviceMaps_.takeStreams(devices);
    message.pendingWork.blockStreams(streams);
    const c10::MultiStreamGuard guard(streams);
    if (const Error error = decodeMessage(std::move(message), devices, decoded)) {
      throw unreadable(error);
    }
    if (!devices.empty()) { // as a future has its readers wait for the streams
      const auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get(), devices);
      future->markCompleted(decoded.message, std::move(decoded.deviceStorages));
      const c10::MultiStreamGuard callers(currentStreams(devices));
    }
  } catch (const c10::Error& failure) {
    throw unreadable(deviceFailed(failure));
  }
  std::vector<at::Tensor> tensors = std::move(decoded.message->tensors());
  const bool isSingle = (flags & wire::kSingle) != 0;
  if (expected.isInOthersMemory) {
    for (at::Tensor& tensor : tensors) {
      tensor = tensor.clone();
    }
  }
  if (!expected.into) {
    return {std::move(tensors), isSingle};
  }
  const std::vector<at::Tensor>& into = *expected.into;
  const bool fits = std::ranges::equal(tensors, into, [](const at::Tensor& value, const at::Tensor& posted) {
    return value.defined() && value.sizes() == posted.sizes() && value.scalar_type() == posted.scalar_type();
  });
  if (!fits) {
    throw std::invalid_argument(
        "the value under tag '" + expected.name.tag + "' from worker '" + from.member().name +
        "' does not fit the tensors that were posted for it: got " + describe(tensors) + "; expected " +
        describe(into));
  }
  const at::NoGradGuard noGrad;
  for (size_t index = 0; index < into.size(); ++index) {
    if (!into[index].is_cpu() || tensors[index].numel() == 0 || tensors[index].layout() != at::kStrided ||
        into[index].const_data_ptr() != tensors[index].const_data_ptr()) {
      into[index].copy_(tensors[index]);
    }
  }
  return {into, isSingle};
}

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
  const auto arrival =
      std::make_shared<Arrival>(from, header.callId, name, body.size(), Arrival::State::kReceiving);
  if (!underWay_.emplace(Number(&from, header.callId), arrival).second) {
    return {Verdict::Fate::kDrop, {}}; // a number that is under way: no worker of ours sends it
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
    return; // no worker of ours has sent it
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
        after.frames.emplace_back(&from, PutRefused{std::string(name.group), *later});
      }
      addOwedLocked(from, message.eagerBody.size(), after);
    } else if (arrival && !arrival->expected) {
      arrival->state = Arrival::State::kHere;
      arrival->message = std::move(message);
    } else if (const ExpectedPtr expected = arrival ? arrival->expected : takeExpectedLocked(from, name)) {
      addOwedLocked(from, message.eagerBody.size(), after);
      expected->message = std::move(message);
      expected->isDone.store(true);
      after.mustWake = true;
    } else {
      arrival = std::make_shared<Arrival>(
          from, message.header.callId, name, message.eagerBody.size(), Arrival::State::kHere);
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
          !from.isThere()
              ? from.failureOfGone()
              : from.failureFrom(
                    why,
                    "could not receive the value under tag '" + arrival->name.tag + "' from " + from.describe() + ": " +
                        why.message()));
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
          // What is here has come before the end, and counts. The inbox drops what is held or being received.
          std::erase_if(slot.arrivals, [&](const ArrivalPtr& arrival) {
            const bool isLost = arrival->state != Arrival::State::kHere;
            if (isLost) {
              dropLocked(arrival, after);
            }
            return isLost;
          });
        }
        std::erase_if(slots, [](const auto& entry) {
          return entry.second.expected.empty() && entry.second.arrivals.empty();
        });
      }
    }
    after.mustWake = true; // put() may wait for room there
  }
  carryOut(after);
}

void Channel::shutDown() {
  std::unordered_map<std::string, Group> dead; // dies without the lock
  {
    const std::lock_guard lock(mutex_);
    dead.swap(groups_);
    held_.clear();
  }
  wakeWaiting({});
  grave_->empty();
}

// ------------------------------------------------------------------------------------------------------ the slots

std::optional<uint64_t> Channel::laterEpochLocked(const wire::PutName& name) const {
  const auto group = groups_.find(std::string(name.group));
  const bool isLater = group != groups_.end() && group->second.isOpen && group->second.epoch > name.epoch;
  return isLater ? std::optional(group->second.epoch) : std::nullopt;
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
  if (arrival->state == Arrival::State::kReceiving) { // what follows its end comes with onPut() or onPutRejected()
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
  owed += bodyBytes + kOverhead;
  if (owed >= kOwedBytes) {
    after.frames.emplace_back(&from, Taken{std::exchange(owed, 0)});
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

std::vector<c10::DataPtr> Channel::memoryIn(
    const Expected& expected, std::span<const std::byte> body, std::span<const uint64_t> spanBytes) const {
  wire::BodyView view;
  if (!expected.into || wire::readBody(body, spanBytes, view)) {
    return {};
  }
  const std::vector<at::Tensor>& into = *expected.into;
  if (view.tensors.size() != into.size()) {
    return {};
  }
  std::vector<c10::DataPtr> memory(spanBytes.size());
  bool isAny = false;
  for (size_t index = 0; index < into.size(); ++index) {
    const wire::TensorRecord& record = view.tensors[index].record;
    const at::Tensor& tensor = into[index];
    const std::span<const int64_t> sizes = view.tensors[index].sizes;
    const std::span<const int64_t> strides = view.tensors[index].strides;
    constexpr uint8_t kBits = wire::kConjugate | wire::kNegative;
    if (record.storage >= view.storages.size() || record.layout != wire::Layout::kStrided ||
        (record.flags & kBits) != 0 || record.storageOffset != 0 || !isContiguousOnHost(tensor) ||
        record.dtype != static_cast<uint8_t>(tensor.scalar_type()) || !std::ranges::equal(sizes, tensor.sizes()) ||
        !std::ranges::equal(strides, tensor.strides())) {
      continue;
    }
    const wire::StorageRecord& storage = view.storages[record.storage].record;
    if (storage.span == wire::kNowhere || view.storages[record.storage].isPacked || memory[storage.span] ||
        storage.bytes != tensor.nbytes() || storage.deviceType != static_cast<int8_t>(c10::kCPU)) {
      continue;
    }
    struct Posted {
      at::Tensor tensor;
      std::shared_ptr<Grave> grave;
    };
    auto posted = std::make_unique<Posted>(tensor, grave_);
    memory[storage.span] = c10::DataPtr(
        tensor.data_ptr(),
        posted.release(),
        [](void* context) {
          const std::unique_ptr<Posted> posted(static_cast<Posted*>(context));
          posted->grave->add(std::move(posted->tensor));
        },
        c10::kCPU);
    isAny = true;
  }
  return isAny ? std::move(memory) : std::vector<c10::DataPtr>();
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
  // A handler may wait for long: neither its thread nor its share of the receive window is missed meanwhile.
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
    if (!messenger_.driveUntil(isOver, std::nullopt)) { // another caller drives
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
  if (!driver || driver->role != Role::kWaitingCaller) { // else that caller looks by itself
    messenger_.wakeWaitingCaller();
  }
}

void Channel::carryOut(Aftermath& after) {
  for (auto& [to, frame] : after.frames) {
    if (to->isThere() && to->member().session != self_.session) {
      messenger_.postControl(*to, frame);
    } else if (const Taken* taken = std::get_if<Taken>(&frame)) {
      onTaken(*to, taken->bytes);
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

Channel::Counts Channel::counts() const {
  const std::lock_guard lock(mutex_);
  return {lastNumber_.load(), taken_.load(std::memory_order_relaxed), untakenBytes_};
}

} // namespace torch_ucx_rpc
