#include "messaging/connection.h"

#include "runtime/worker_mutex.h"

namespace torch_ucx_rpc {

Connection::Connection(Peer& peer) : peer_(peer) {
  if (const Member& member = peer.member(); !member.sendKey.empty()) {
    sealer.emplace(member.sendKey);
    opener.emplace(member.receiveKey);
  }
}

void Connection::transition(Event event) {
  assertHoldsWorkerLock();
  switch (event) {
    case Event::kAsked:
      state_ = State::kJoining;
      return;
    case Event::kConnected:
    case Event::kDisconnected:
      if (state_ == State::kJoining) {
        return;
      }
      [[fallthrough]];
    case Event::kAdmitted:
      state_ = endpoint().has_value() ? State::kOpen : State::kUnmet;
  }
}

void Connection::setEndpoint(std::optional<EndpointId> endpoint) {
  path().endpoint = endpoint;
  transition(endpoint.has_value() ? Event::kConnected : Event::kDisconnected);
}

std::vector<Receiving::Entry>::iterator Connection::Incoming::next() {
  return isOldestsTurn ? waiting.begin() : std::ranges::min_element(waiting, {}, [](Receiving::Entry receiving) {
    return receiving->parts.size() - receiving->begun;
  });
}

bool Connection::waitsForDevice() const {
  return !outgoing.unready.empty() || std::ranges::any_of(incoming.starting, [](Receiving::Entry receiving) {
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

Connection& Connections::add(Peer& peer) {
  assertHoldsWorkerLock();
  all_.push_back(std::make_unique<Connection>(peer));
  peer.connection = all_.back().get();
  return *peer.connection;
}

} // namespace torch_ucx_rpc
