#pragma once

#include "peers/directory.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace torch_ucx_rpc {

// Notices peers that fall silent and whose process cannot be watched (peers/process_watch.h), since it runs on another machine or in
// another pid namespace. A dead host or a cut cable shows in nothing else: UCX reports neither within 45 s.
//
// Whatever comes from a peer is a sign of life. One that gave none for a period is asked for one, once: transports are reliable, and
// answers come from whichever thread drives the other agent, which never waits for Python. One that stays silent for longer
// than the limit is lost. Time during which this process did not run itself does not count. Everything here runs under the worker lock.
class Heartbeat {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // 0: never gives a peer up.
  Heartbeat(const Directory& directory, Milliseconds limit) : directory_(directory), limit_(limit) {}

  bool isOn() const {
    return limit_.count() != 0;
  }
  // How often check() is to be called.
  Milliseconds period() const {
    return std::max(Milliseconds(1), limit_ / kPeriodsPerLimit);
  }

  struct Findings {
    std::vector<Peer*> quiet; // to be asked for a sign of life
    std::vector<Peer*> lost;
  };
  // Of the peers that this worker has an endpoint to.
  Findings check(Clock::time_point now);

  // What is said of a lost peer.
  Error describe(const Peer& peer) const;

 private:
  // Few enough that an idle pair costs two small messages a second at the default limit.
  static constexpr int kPeriodsPerLimit = 20;
  // TCP sends again what a cut cable has swallowed after 0.2 s and then after twice the time, again and again. What was sent at the
  // beginning of a cut that lasts half the limit arrives up to this much after the limit.
  static constexpr auto kRetransmission = Milliseconds(300);

  const Directory& directory_;
  const Milliseconds limit_;
  Clock::time_point lastCheck_{};
};

} // namespace torch_ucx_rpc
