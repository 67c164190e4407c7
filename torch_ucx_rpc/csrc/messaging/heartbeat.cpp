#include "messaging/heartbeat.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

std::string seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time.count()) / 1000);
  return text;
}

} // namespace

Heartbeat::Findings Heartbeat::check(Clock::time_point now) {
  Findings findings;
  // A stopped process, or one on a machine that slept, gets nothing from any peer. That time is not the peers' silence.
  const auto passed =
      std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), 2 * period());
  for (Peer* peer : directory_.all()) {
    Connection* const connection = peer->connection;
    // An error of this process may have closed the endpoint to a peer that has been heard. A ping makes another
    // endpoint.
    if (connection == nullptr || !peer->isThere() ||
        (!connection->endpoint().has_value() && !connection->isHeard && !connection->mustRetry())) {
      continue;
    }
    Connection::Silence& silence = connection->silence;
    if (std::exchange(silence.heardSinceCheck, false)) {
      if (silence.isSuspect) {
        findings.back.emplace_back(peer, silence.lasted);
        peer->isResuming.store(false);
      }
      silence = {};
      if (!std::exchange(connection->isHeard, true) && peer->needsHeartbeat.load()) {
        findings.met.push_back(peer);
      }
      continue;
    }
    const bool isWatched = !peer->needsHeartbeat.load();
    if (isWatched && connection->outgoing.underWay == 0 && !silence.isSuspect) {
      silence.lasted = Milliseconds(0); // the peer has no reason to send anything
      continue;
    }
    silence.lasted += passed;
    const Milliseconds limit = isWatched ? limit_ : limit_ + period() + kRetransmission;
    const Milliseconds last = silence.isDoubted ? std::min(kDoubt, limit) : limit + reconnectLimit_;
    if (!isWatched && silence.lasted >= last) {
      findings.lost.push_back(peer);
      continue;
    }
    if (silence.lasted >= limit && !std::exchange(silence.isSuspect, true)) {
      findings.suspect.push_back(peer);
      peer->isResuming.store(true);
      peer->timesResumed.fetch_add(1, std::memory_order_relaxed);
    }
    if (!isWatched && peer->hasAdmitted.load() && !std::exchange(silence.isAsked, true)) {
      findings.quiet.push_back(peer);
    }
  }
  return findings;
}

void Heartbeat::doubt(Peer& peer, Clock::time_point now) const {
  // The next check adds the time since the last check, so `lasted` begins below 0 by that much.
  const auto sinceCheck = std::chrono::duration_cast<Milliseconds>(now - lastCheck_);
  Connection::Silence& silence = peer.connection->silence;
  silence = {
      .isAsked = true,
      .isSuspect = silence.isSuspect,
      .isDoubted = true,
      .lasted = -std::min(sinceCheck, 2 * period())};
}

std::string Heartbeat::describeSuspect(const Peer& peer) const {
  if (peer.needsHeartbeat.load()) {
    return peer.describe() + " has given no sign of life for " + seconds(peer.connection->silence.lasted) +
        ": its host is down, the network between is cut, or its process is stopped. Calls to it wait for their "
        "timeouts; it is lost when the silence has lasted for " +
        seconds(reconnectLimit_) + " more (reconnect_limit)";
  }
  return peer.describe() + " takes no messages and has given no sign of life for " +
      seconds(peer.connection->silence.lasted) +
      ", though its process is there: it is stopped (SIGSTOP, a debugger, a frozen container) or writes a core dump. "
      "Calls to it end with their timeouts";
}

std::string Heartbeat::describeBack(const Peer& peer, Milliseconds silence) {
  return peer.describe() + " is heard again after " + seconds(silence) + " of silence, and calls to it go on";
}

Error Heartbeat::describe(const Peer& peer) const {
  const Connection::Silence& silence = peer.connection->silence;
  if (silence.isDoubted) {
    return {ErrorCode::kPeerFailed, "its process has ended: its host refuses connections to it, and it is silent"};
  }
  return {
      ErrorCode::kPeerFailed,
      "no sign of life for " + seconds(silence.lasted) +
          ", though this worker asked for one: its host is down, the network between is cut, or its process is "
          "stopped; heartbeat_limit is " +
          seconds(limit_) + " and reconnect_limit " + seconds(reconnectLimit_)};
}

} // namespace torch_ucx_rpc
