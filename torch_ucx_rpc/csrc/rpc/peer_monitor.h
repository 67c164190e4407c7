#pragma once

#include "messaging/event_handlers.h"
#include "messaging/heartbeat.h"
#include "peers/lifelines.h"
#include "peers/peer.h"
#include "peers/process_watch.h"
#include "rpc/agent_parts.h"

#include <atomic>
#include <vector>

namespace torch_ucx_rpc {

// Decides that a peer is gone, and tells its observers, once. It learns of an end from the peer's goodbye, from the end
// of its process (same machine), from its silence or the end of its lifeline (elsewhere), or from the transport. A lost
// worker stays lost; late messages are dropped. Thread-safe.
class PeerMonitor final : public PeerHandler, private AgentParts {
 public:
  PeerMonitor(
      const AgentParts& parts,
      std::chrono::milliseconds heartbeatLimit,
      std::chrono::milliseconds reconnectLimit = std::chrono::milliseconds(0));

  // Adds an observer, before start(). Observers learn of each gone peer, in the order in which they were added.
  void addObserver(PeerObserver& observer) {
    observers_.push_back(&observer);
  }

  // Begins to watch the given peers, except watched ones. `self` is this worker.
  void watch(const Member& self, const std::vector<Peer*>& peers);

  // Ends a peer. Does nothing if it is gone already, if this agent is closed, or if all are leaving.
  void end(Peer& peer, Peer::State state, Error why);

  // To be called when a graceful join has succeeded. From now on a peer may vanish without being lost.
  void setEverybodyLeaving();
  bool isEverybodyLeaving() const {
    return isEverybodyLeaving_.load();
  }

  // Tells peers that this worker ends, so that none of them takes it for a crash. All of this worker's answers must
  // have been sent: a peer that gets the goodbye awaits no more answers. Says nothing if all workers are leaving.
  void sayGoodbye();

  // PeerHandler.
  void onGoodbye(Peer& from) override;
  void onFailure(Peer& peer, Error why) override;
  void onBroken(Peer& peer) override;
  void onControlNotSent(Peer& to, const Error& why) override;

 private:
  // Timer task: checks the heartbeats.
  Timer::TimePoint beat(Timer::TimePoint now);
  void checkHeartbeatsWithWorkerLock(Timer::TimePoint now);
  // Connects the lifeline of a peer from which something has just come, if the transport does not notice the peer's
  // end.
  void connectLifelineWithWorkerLock(Peer& peer);
  // To be called when the port of the lifeline is closed: the process has probably ended.
  void onLifelineCutWithWorkerLock(Peer& peer);

  const bool mayResume_;
  Timer::Task& heartbeatTask_;
  std::vector<PeerObserver*> observers_; // constant after start()

  ProcessWatch processes_; // own synchronization
  Lifelines lifelines_; // own synchronization
  Heartbeat heartbeat_; // guarded by the worker lock
  std::atomic<bool> isEverybodyLeaving_{false};
};

} // namespace torch_ucx_rpc
