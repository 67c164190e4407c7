#include "peers/heartbeat.h"

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
  // A process that was stopped, or a machine that slept, has heard nobody: that is nobody's silence.
  const auto passed =
      std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), 2 * period());
  for (Peer* peer : directory_.all()) {
    if (!peer->needsHeartbeat.load() || !peer->isThere() || !peer->endpoint.has_value()) {
      continue;
    }
    Peer::Silence& silence = peer->silence;
    if (std::exchange(silence.heardSinceCheck, false)) {
      silence = {};
      continue;
    }
    silence.lasted += passed;
    if (silence.lasted >= limit_ + period() + kRetransmission) {
      findings.lost.push_back(peer);
    } else if (!std::exchange(silence.isAsked, true)) {
      findings.quiet.push_back(peer);
    }
  }
  return findings;
}

Error Heartbeat::describe(const Peer& peer) const {
  return {
      ErrorCode::kPeerFailed,
      "no sign of life for " + seconds(peer.silence.lasted) +
          ", though asked for one: its host is down, the network between is cut, or its process is stopped; "
          "heartbeat_limit is " +
          seconds(limit_)};
}

} // namespace torch_ucx_rpc
