#include "messaging/connection.h"

#include "runtime/worker_mutex.h"

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// After this many bytes an acknowledgement leaves at once. The peer keeps at most eight times as many eager bytes of
// each kind (OutgoingLoad::kMaxEagerBytes).
constexpr uint64_t kUnacknowledgedBytes = 1024 * 1024;

// If endpoints fail one after another, Retries makes the next ones after 1, 2, 4, ... of its rounds. The longest wait
// is 0.6 s.
constexpr unsigned kMaxDoublings = 5;

} // namespace

Connection::Connection(Peer& peer) : peer_(peer) {
  if (const Member& member = peer.member(); !member.sendKey.empty()) {
    sealer.emplace(member.sendKey);
    opener.emplace(member.receiveKey);
  }
}

void Connection::transition(Event event) {
  assertHoldsWorkerLock();
  switch (event) {
    case Event::kBroken:
      state_ = State::kResuming;
      return;
    case Event::kConnected:
    case Event::kDisconnected:
      state_ = endpoint().has_value() ? State::kOpen : State::kUnmet;
  }
}

void Connection::setEndpoint(std::optional<EndpointId> endpoint) {
  path().endpoint = endpoint;
  if (endpoint.has_value() && ++outgoing.endpoints == 0) {
    outgoing.endpoints = 1; // 0 stands for none
  }
  transition(endpoint.has_value() ? Event::kConnected : Event::kDisconnected);
}

void Connection::breakOff(const std::string& why) {
  path().endpoint.reset();
  transition(Event::kBroken);
  failures = isUnproven ? failures + 1 : 0;
  // A failing endpoint is not a sign of life: the peer's host may be out of reach.
  silence = {.isSuspect = true, .lasted = isUnproven ? silence.lasted : std::chrono::milliseconds(0)};
  roundsToResume = 1u << std::min(failures, kMaxDoublings);
  isUnproven = true;
  outgoing.whyBroken.clear();
  if (!peer_.isResuming.exchange(true)) {
    whyBroken = why;
    peer_.timesResumed.fetch_add(1, std::memory_order_relaxed);
  }
}

bool Connection::Incoming::isOutdated(uint16_t number) const {
  return number != 0 && static_cast<int16_t>(number - endpoint) < 0;
}

uint64_t Connection::Incoming::lacking() const {
  for (const auto& [first, end] : received.missing()) {
    for (uint64_t number = first; number < end; ++number) {
      if (!announced.contains(number)) {
        return number;
      }
    }
  }
  return 0;
}

bool Connection::Incoming::noteEndpoint(uint16_t number) {
  const bool isNew = number != 0 && number != endpoint && !isOutdated(number);
  endpoint = isNew ? number : endpoint;
  mayBeOutdated |= isNew && !announced.empty();
  return isNew;
}

std::vector<const void*> Connection::Incoming::outdatedOrigins() {
  std::vector<const void*> origins;
  if (!mayBeOutdated) {
    return origins;
  }
  for (const auto& [key, announcement] : announced) {
    if (announcement.isBeingReceived && isOutdated(announcement.endpoint) &&
        std::ranges::find(origins, announcement.origin) == origins.end()) {
      origins.push_back(announcement.origin);
    }
  }
  mayBeOutdated = !origins.empty();
  return origins;
}

std::vector<Receiving::Entry>::iterator Connection::Incoming::next() {
  return isOldestsTurn ? waiting.begin() : std::ranges::min_element(waiting, {}, [](Receiving::Entry receiving) {
    return receiving->parts.size() - receiving->begun;
  });
}

bool Connection::waitsForDevice() const {
  const auto isForDevice = [](const std::unique_ptr<OutgoingMessage>& message) {
    return message->waitsFor == OutgoingMessage::Wait::kDevice;
  };
  return std::ranges::any_of(outgoing.held, isForDevice) ||
      std::ranges::any_of(incoming.starting, [](Receiving::Entry receiving) {
           return receiving->isPlanned && receiving->allocation == nullptr;
         });
}

Connection* Connections::find(EndpointId endpoint) const {
  const auto found = std::ranges::find_if(all_, [&](const std::unique_ptr<Connection>& connection) {
    return std::ranges::any_of(
        connection->paths, [&](const Connection::Path& path) { return path.endpoint == endpoint; });
  });
  return found != all_.end() ? found->get() : nullptr;
}

void Connections::noteArrival(Connection& connection, uint64_t bytes) {
  Connection::Incoming& incoming = connection.incoming;
  incoming.unacknowledgedBytes += bytes + OutgoingLoad::kEagerOverhead;
  if (!std::exchange(incoming.isOwing, true)) {
    owing_.push_back(&connection);
  }
  if (incoming.unacknowledgedBytes >= kUnacknowledgedBytes && !connection.mustAcknowledge) {
    connection.mustAcknowledge = true;
    makeReady(connection);
  }
}

Connection& Connections::add(Peer& peer) {
  assertHoldsWorkerLock();
  all_.push_back(std::make_unique<Connection>(peer));
  peer.connection = all_.back().get();
  return *peer.connection;
}

} // namespace torch_ucx_rpc
