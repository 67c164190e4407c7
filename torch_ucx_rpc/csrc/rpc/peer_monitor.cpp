#include "rpc/peer_monitor.h"

#include "base/warnings.h"
#include "runtime/worker_mutex.h"

#include <algorithm>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

PeerMonitor::PeerMonitor(
    const AgentParts& parts, std::chrono::milliseconds heartbeatLimit, std::chrono::milliseconds reconnectLimit)
    : AgentParts(parts),
      mayResume_(heartbeatLimit.count() != 0 && reconnectLimit.count() != 0),
      heartbeatTask_(timer_.add([this](Timer::TimePoint now) { return beat(now); })),
      processes_([this](int fd, UniqueFunction<void()> onReadable) {
        messenger_.progress().watch(fd, std::move(onReadable));
      }),
      lifelines_([this](int fd, UniqueFunction<void()> onReadable) {
        messenger_.progress().watch(fd, std::move(onReadable));
      }),
      heartbeat_(directory_, heartbeatLimit, reconnectLimit) {}

void PeerMonitor::watch(const Member& self, const std::vector<Peer*>& peers) {
  for (Peer* peer : peers) {
    // Group passes all present peers each time, and several threads may do so at once.
    if (peer->member().session == self.session || peer->isWatched.exchange(true)) {
      continue;
    }
    const Error ended(ErrorCode::kPeerFailed, "its process has ended");
    const ProcessWatch::Outcome outcome = processes_.add(peer->member(), self, [this, peer, ended] {
      messenger_.drainTransportWithWorkerLock(); // messages that it sent before its end count
      peer->hasEnded.store(true);
      messenger_.addFailureWithWorkerLock(*peer, ended);
    });
    if (outcome == ProcessWatch::Outcome::kHasEnded) {
      peer->hasEnded.store(true);
      end(*peer, Peer::State::kFailed, peer->lost(ended));
      continue;
    }
    if (heartbeat_.isOn()) {
      const bool isElsewhere = outcome == ProcessWatch::Outcome::kNotPossible;
      peer->needsHeartbeat.store(isElsewhere);
      // Without its lifeline, a failed endpoint would be the only sign that it has died.
      const bool isEndSeen = isElsewhere && peer->member().lifelinePort != 0;
      peer->isEndSeen.store(isEndSeen);
      peer->mayResume.store(mayResume_ && isEndSeen);
      heartbeatTask_.dueIn(heartbeat_.period()); // also for a watched process: it may be stopped
    }
  }
}

// How this worker sees the end of a peer, and which functions lead to end():
//
//   goodbye                                        onGoodbye()
//   its process had ended before watch()           watch()
//   end of its process, on this machine            watch(), addFailureWithWorkerLock(), onFailure()
//   silence, elsewhere                             checkHeartbeatsWithWorkerLock(), and on in the same way
//   end of its lifeline, elsewhere, not over TCP   Heartbeat::doubt(), which shortens the silence that it takes
//   an endpoint that the transport reports         Inbox::onEndpointFailed(), onFailure()
//   the same, and Peer::mayResume                  onBroken(), then a refusal of its lifeline, or silence
//   a control frame that cannot be sent            onControlNotSent(), onFailure()
//   it is off the list of a dynamic group          Group::removeMember()
//
// All but the first two and the last two go through EventBuffer::addFailure(), and so come after everything that has
// arrived. So what the peer sent before its end counts.
void PeerMonitor::end(Peer& peer, Peer::State state, Error why) {
  // An end may be seen in several ways at once. Only the call that moves the state goes on, so observers learn of it
  // once.
  if (lifetime_.isClosed() || isEverybodyLeaving_.load() || !peer.moveTo(state, std::move(why))) {
    return;
  }
  processes_.forget(peer.member());
  lifelines_.forget(peer.member());
  for (PeerObserver* observer : observers_) {
    observer->onPeerGone(peer);
  }
}

void PeerMonitor::sayGoodbye() {
  if (isEverybodyLeaving_.load()) {
    return;
  }
  // Only peers that were met, and neighbours, get it. The process watch of a neighbour would take the end for a crash.
  // If all peers got it, each worker of a failing job of a thousand would connect to all others.
  for (Peer* peer : directory_.all()) {
    const bool wasMet = peer->isMet.load() || peer->isNeighbour.load();
    if (wasMet && peer->isThere() && peer->member().session != self_.session) {
      messenger_.postControl(*peer, {wire::Kind::kGoodbye});
    }
  }
}

void PeerMonitor::onGoodbye(Peer& from) {
  end(from, Peer::State::kLeft, {ErrorCode::kShutDown, from.describe() + " has shut down its RPC agent"});
}

void PeerMonitor::onFailure(Peer& peer, Error why) {
  if (isLocal(why.code())) {
    return; // a local error says nothing about the peer
  }
  end(peer, Peer::State::kFailed, peer.lost(why));
}

// The port of the lifeline shows whether the process has ended: its kernel then refuses a connection. If the process
// lives, the lifeline shows its end from then on. If the port cannot be reached, silence decides.
void PeerMonitor::onBroken(Peer& peer) {
  if (lifetime_.isClosed() || isEverybodyLeaving_.load() || !peer.isThere()) {
    return;
  }
  lifelines_.connect(peer.member(), [this, &peer] { onLifelineCutWithWorkerLock(peer); }, true);
}

void PeerMonitor::setEverybodyLeaving() {
  isEverybodyLeaving_.store(true);
  for (Peer* peer : directory_.all()) {
    peer->mayResume.store(false); // this worker must not try to reach those that end early
  }
}

void PeerMonitor::onControlNotSent(Peer& to, const Error& why) {
  // Another worker may wait for the effect of the frame: an acknowledgment, the end of a barrier. If the peer's agent
  // ended right before this worker would have connected, and its process goes on, nothing else shows that. An error of
  // this process says nothing about the peer. The table before Outbox::finish() has the other messages.
  if (!isLocal(why.code())) {
    onFailure(to, why);
  }
}

Timer::TimePoint PeerMonitor::beat(Timer::TimePoint now) {
  messenger_.progress().submit([this, now] { checkHeartbeatsWithWorkerLock(now); });
  messenger_.requestRepair(); // if this worker makes no calls, no timeout requests it
  return now + heartbeat_.period();
}

void PeerMonitor::checkHeartbeatsWithWorkerLock(Timer::TimePoint now) {
  assertHoldsWorkerLock();
  if (lifetime_.isClosed()) {
    return; // the transport may be closed too
  }
  messenger_.drainTransportWithWorkerLock(); // a peer whose message no thread has looked at yet is not silent
  const Heartbeat::Findings findings = heartbeat_.check(now);
  for (Peer* peer : findings.met) {
    connectLifelineWithWorkerLock(*peer);
  }
  for (Peer* peer : findings.quiet) {
    messenger_.sendNowWithWorkerLock(*peer, wire::Kind::kPing);
  }
  for (Peer* peer : findings.suspect) {
    warn(heartbeat_.describeSuspect(*peer));
  }
  for (const auto& [peer, silence] : findings.back) {
    warn(Heartbeat::describeBack(*peer, silence));
  }
  for (Peer* peer : findings.lost) {
    peer->hasEnded.store(peer->connection->silence.isDoubted);
    messenger_.addFailureWithWorkerLock(*peer, heartbeat_.describe(*peer));
  }
}

void PeerMonitor::connectLifelineWithWorkerLock(Peer& peer) {
  if (!peer.connection->endpoint().has_value()) {
    return; // onBroken() has connected it
  }
  const std::vector<std::string> lanes = messenger_.transport().lanes(*peer.connection->endpoint());
  const auto isTcp = [](const std::string& lane) { return lane.starts_with("tcp/"); };
  if (std::any_of(lanes.begin(), lanes.end(), isTcp)) {
    return; // UCX reports the end of a TCP connection
  }
  lifelines_.connect(peer.member(), [this, &peer] { onLifelineCutWithWorkerLock(peer); });
}

void PeerMonitor::onLifelineCutWithWorkerLock(Peer& peer) {
  if (lifetime_.isClosed() || !peer.isThere()) {
    return;
  }
  messenger_.drainTransportWithWorkerLock(); // messages that it sent before its end count
  if (peer.connection->isUnproven) {
    peer.hasEnded.store(true);
    messenger_.addFailureWithWorkerLock(
        peer,
        {ErrorCode::kPeerFailed,
         "its process has ended: the connection to it has failed, and its host refuses new ones"});
    return;
  }
  heartbeat_.doubt(peer, timer_.now());
  messenger_.sendNowWithWorkerLock(peer, wire::Kind::kPing);
}

} // namespace torch_ucx_rpc
