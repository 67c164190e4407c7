#pragma once

#include "messaging/connection.h"
#include "peers/directory.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Notices peers that fall silent. This worker cannot watch a process on another machine or in another pid namespace
// (peers/process_watch.h). For such a process, nothing else shows a dead host or a cut cable: UCX reports neither
// within 45 seconds.
//
// Any frame from a peer is a sign of life. PeerMonitor asks an unwatched peer that sent none for a period. It asks only
// once, since transports are reliable. The answer comes from the thread that drives the other agent, which never waits
// for Python.
//
// There are two limits. A peer that is silent for longer than the first is suspect: calls to it wait. The next sign of
// life ends the suspicion. A peer that stays silent for the reconnect limit as well is lost. A peer whose process is
// watched is never lost by silence. Time in which this process itself did not run does not count. Connection::silence
// keeps the duration. All functions but isOn() and period() need the worker lock.
class Heartbeat {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // A `limit` of 0 turns the heartbeat off: silence ends no peer. With a `reconnectLimit` of 0 a peer is lost at
  // the first limit.
  Heartbeat(const Directory& directory, Milliseconds limit, Milliseconds reconnectLimit = Milliseconds(0))
      : directory_(directory), limit_(limit), reconnectLimit_(reconnectLimit) {}

  bool isOn() const {
    return limit_.count() != 0;
  }
  // The interval at which to call check().
  Milliseconds period() const {
    return std::max(Milliseconds(1), limit_ / kPeriodsPerLimit);
  }

  struct Findings {
    std::vector<Peer*> quiet; // peers to ask for a sign of life
    std::vector<Peer*> lost;
    std::vector<Peer*> suspect; // newly suspect; a watched process only if messages wait for it
    std::vector<std::pair<Peer*, Milliseconds>> back; // no longer suspect, after this silence
    std::vector<Peer*> met; // heard for the first time; their processes cannot be watched
  };
  // Checks the peers that this worker has an endpoint to or has heard, and those whose connections Retries works on.
  Findings check(Clock::time_point now);

  // Call it when the process of a peer has probably ended, and ask the peer for a sign of life. Unless one comes, the
  // peer is lost within kDoubt and a period, whatever the limit.
  void doubt(Peer& peer, Clock::time_point now) const;

  // Sentences for the log.
  std::string describeSuspect(const Peer& peer) const;
  static std::string describeBack(const Peer& peer, Milliseconds silence);

  // The error that names how long a lost peer was silent.
  Error describe(const Peer& peer) const;

 private:
  // Chosen so that an idle pair costs two small messages a second at the default limit.
  static constexpr int kPeriodsPerLimit = 20;
  // TCP sends lost data again after 0.2 s, and each further time after twice the wait. Data from the beginning of a cut
  // that lasts half the limit may therefore arrive this much after the limit.
  static constexpr auto kRetransmission = Milliseconds(300);
  static constexpr auto kDoubt = Milliseconds(1000);

  const Directory& directory_;
  const Milliseconds limit_;
  const Milliseconds reconnectLimit_;
  Clock::time_point lastCheck_{};
};

} // namespace torch_ucx_rpc
