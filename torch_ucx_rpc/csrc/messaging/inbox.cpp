#include "messaging/inbox.h"

#include "base/warnings.h"
#include "runtime/worker_mutex.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace torch_ucx_rpc {

void Inbox::acceptJoins(const std::string& joinKey) {
  acceptsJoins_ = true;
  if (!joinKey.empty()) {
    joinOpener_.emplace(joinKey);
  }
}

bool Inbox::checkHeader(std::span<const std::byte> bytes, wire::Header& header) {
  if (Error error = wire::readHeader(bytes, header)) {
    rejectFrame(FrameFault::kMalformed, error.message());
    return false;
  }
  // Addresses are used again: a port by the next job, a process id by the next process.
  if (header.targetSession != session_) {
    rejectFrame(
        FrameFault::kStaleSession, "a frame meant for a worker that had this address before, or of another job");
    return false;
  }
  return true;
}

Connection* Inbox::findSender(const wire::Header& header, uint64_t dataBytes, std::span<const std::byte> data) {
  Peer* from = directory_.findSession(header.sourceSession);
  if (from == nullptr || from->member().rank != static_cast<int64_t>(header.sourceRank)) {
    if (from == nullptr && header.kind == wire::Kind::kGoodbye && acceptsJoins_ && !joinOpener_.has_value()) {
      // Not worth a warning: a process asked to join, and then learned that this worker is leaving.
      return nullptr;
    }
    rejectFrame(FrameFault::kStranger, "a frame from a process that is not a worker of this job");
    return nullptr;
  }
  Connection& connection = connections_.of(*from);
  if (std::optional<wire::FrameSeal>& opener = connection.opener) {
    // Checks the seal first. A forged frame must not use up the number of a genuine frame, which would then be dropped.
    if (!opener->isGenuine(header, dataBytes, data)) {
      rejectFrame(
          FrameFault::kForged,
          "a frame in the name of " + from->describe() + " that is not sealed with the job's secret");
      return nullptr;
    }
    if (header.sequence == 0 && header.kind != wire::Kind::kReceived) {
      rejectFrame(FrameFault::kReplayed, "a frame of " + from->describe() + " without a number, which may be a replay");
      return nullptr;
    }
  }
  return &connection;
}

bool Inbox::takeNumber(Connection& from, const wire::Header& header, uint64_t bytes, bool isRendezvous) {
  from.outgoing.kept.onAcknowledged(header.acknowledged);
  if (from.outgoing.kept.hasEnded()) {
    connections_.makeReady(from);
  }
  if (header.sequence == 0) {
    return true;
  }
  if (from.incoming.noteEndpoint(header.endpoint)) {
    connections_.makeReady(from); // Messenger schedules Retries, which ends receives over earlier endpoints
  }
  if (isRendezvous && from.incoming.isOutdated(header.endpoint)) {
    return false; // the peer announces it again over its present endpoint
  }
  wire::ReplayWindow& received = from.incoming.received;
  // A rendezvous takes its number when it has been received.
  if (isRendezvous ? received.hasCome(header.sequence) : !received.accept(header.sequence)) {
    // Each frame that was under way when an endpoint failed may come twice. While timesResumed is 0, this worker takes
    // such a frame for a replay.
    if (from.opener.has_value() && from.peer().timesResumed.load(std::memory_order_relaxed) == 0) {
      rejectFrame(FrameFault::kReplayed, "a frame of " + from.peer().describe() + " that has come before");
    }
    return false;
  }
  if (!isRendezvous) {
    connections_.noteArrival(from, bytes);
  }
  return true;
}

Announcement* Inbox::announce(Connection& from, const wire::Header& header, void* rendezvous) {
  Connection::Incoming& incoming = from.incoming;
  const bool isNumbered = header.sequence != 0;
  const uint64_t key = isNumbered ? header.sequence : ~incoming.unnumbered++;
  const auto [entry, isNew] = incoming.announced.try_emplace(
      key,
      Announcement{
          .from = &from, .key = key, .rendezvous = rendezvous, .isNumbered = isNumbered, .endpoint = header.endpoint});
  Announcement& announcement = entry->second;
  if (isNew) {
    return &announcement;
  }
  if (announcement.isBeingReceived) {
    receiver_.releaseHandle(std::exchange(announcement.again, rendezvous));
    announcement.endpointAgain = header.endpoint;
  } else if (announcement.rendezvous == nullptr || announcement.endpoint != header.endpoint) {
    receiver_.releaseHandle(std::exchange(announcement.rendezvous, rendezvous));
    announcement.endpoint = header.endpoint;
    std::ranges::move(std::exchange(incoming.stalled, {}), std::back_inserter(incoming.waiting));
    connections_.makeReady(from);
  } else {
    receiver_.releaseHandle(rendezvous); // it has come twice over this endpoint, or is a replay
  }
  return nullptr;
}

void Inbox::onReceived(Connection& from, std::span<const std::byte> body) {
  const std::optional<ReceivedFrames> received = decodeReceived(body);
  if (!received.has_value()) {
    return; // the next kReceived says the same
  }
  from.outgoing.kept.onReceived(received->frames);
  if (received->mustSendAgain) {
    from.outgoing.mustSendAgain = true;
    // The endpoint delivers later frames, but not the missing ones. The peer has given up its end, and UCX drops
    // announcements.
    if (received->frames.next() > from.outgoing.sentAgainBelow && received->frames.gaps() != 0) {
      from.outgoing.whyBroken = "messages that left over it have not arrived";
    }
  }
  connections_.makeReady(from);
}

void Inbox::rejectFrame(FrameFault fault, const std::string& what) {
  countRefused();
  // One warning for each kind: otherwise a stranger could fill the log.
  if (!hasWarned_.test(static_cast<size_t>(fault))) {
    hasWarned_.set(static_cast<size_t>(fault));
    warn("refused " + what + " (more of the kind are only counted: agent.frames_refused in get_metrics)");
  }
}

void Inbox::onEager(std::span<const std::byte> headerBytes, std::span<const std::byte> bytes) {
  assertHoldsWorkerLock();
  wire::Header header;
  if (!checkHeader(headerBytes, header)) {
    return;
  }
  // The sender of a join is not a member yet, so findSender() would not find it.
  if (header.kind == wire::Kind::kJoin && acceptsJoins_) {
    onJoin(header, bytes);
    return;
  }
  if (header.index != wire::kBodyIndex) {
    rejectFrame(FrameFault::kMalformed, "a malformed frame: spans come by rendezvous");
    return;
  }
  // Copies the bytes only after the check, so a flood of strangers' frames costs no memory.
  Connection* from = findSender(header, bytes.size(), bytes);
  if (from != nullptr && takeNumber(*from, header, bytes.size(), false)) {
    add(*from, header, {Bytes(bytes), nullptr, 0});
  }
}

void Inbox::onJoin(const wire::Header& header, std::span<const std::byte> record) {
  if (joinOpener_.has_value() && !joinOpener_->isGenuine(header, record.size(), record)) {
    rejectFrame(FrameFault::kForged, "a process that wants to join the group and does not have the job's secret");
    return;
  }
  // A worker repeats its join until this worker acknowledges it. It sends frames with numbers only afterwards, or when
  // it gives up (a goodbye).
  const Peer* known = directory_.findSession(header.sourceSession);
  if (known != nullptr && known->connection != nullptr && known->connection->incoming.received.firstMissing() > 1) {
    rejectFrame(FrameFault::kReplayed, "a join of a process that has joined before");
    return;
  }
  events_.addJoin(header.sourceSession, Bytes(record));
}

void Inbox::onRendezvous(std::span<const std::byte> headerBytes, void* rendezvous, uint64_t bytes) {
  assertHoldsWorkerLock();
  wire::Header header;
  Connection* from = nullptr;
  if (checkHeader(headerBytes, header)) {
    if (wire::isMessage(header.kind)) {
      from = findSender(header, bytes, {});
    } else {
      rejectFrame(FrameFault::kMalformed, "a malformed frame: only requests, responses and puts come by rendezvous");
    }
  }
  if (from == nullptr || !takeNumber(*from, header, bytes, true)) {
    receiver_.releaseHandle(rendezvous); // otherwise the sender's operation would never complete
    return;
  }
  if (Announcement* const announcement = announce(*from, header, rendezvous)) {
    add(*from, header, {{}, announcement, bytes});
  }
}

void Inbox::onEndpointFailed(EndpointId endpoint, const Error& error) {
  Connection* const connection = connections_.find(endpoint);
  if (connection == nullptr) {
    return;
  }
  if (connection->mayResume()) {
    if (connection->endpoint() == endpoint) {
      connection->breakOff(error.message());
      connections_.makeReady(*connection); // Messenger schedules Retries, which resumes it
      if (!isLocal(error.code())) {
        events_.addBreak(connection->peer());
      }
    } // else this endpoint was given up before
  } else if (isLocal(error.code()) && connection->endpoint() == endpoint) {
    connection->setEndpoint(std::nullopt); // the peer is healthy, and the next message makes another endpoint
    connection->silence.isAsked = false; // the ping may not have reached the peer
    // The peer may take the end of the connection for the end of this worker, and drop later frames. Only its silence
    // shows that.
    connection->peer().needsHeartbeat.store(true);
  } else {
    events_.addFailure(connection->peer(), error);
  }
}

void Inbox::add(Connection& from, const wire::Header& header, wire::Piece piece) {
  if (from.state() == Connection::State::kClosed) { // calls to the peer have failed already, so it stays lost
    receiver_.release(piece);
    if (from.peer().state() == Peer::State::kFailed && from.peer().mayResume.load(std::memory_order_relaxed)) {
      from.isPinged = true; // the peer may have come back too late: a goodbye stops its sending
      connections_.makeReady(from);
    }
    return;
  }
  // With a secret, only a number proves that a frame is not a replay.
  if (header.sequence != 0 || !from.opener.has_value()) {
    from.silence.heardSinceCheck = true;
    from.isUnproven = false;
  }
  from.peer().isMet.store(true, std::memory_order_relaxed);
  switch (header.kind) {
    case wire::Kind::kCancel:
      onCancel(from, header.callId);
      return;
    case wire::Kind::kPing:
      from.isPinged = true;
      connections_.makeReady(from);
      return;
    case wire::Kind::kPong:
      return;
    case wire::Kind::kReceived:
      onReceived(from, piece.data);
      return;
    case wire::Kind::kUseNetwork:
      from.isMoving = true;
      connections_.makeReady(from);
      return;
    case wire::Kind::kRequest:
    case wire::Kind::kResponse:
    case wire::Kind::kPut:
      from.peer().bytesReceived.fetch_add(piece.size(), std::memory_order_relaxed);
      assemble(from, header, std::move(piece));
      return;
    default:
      from.peer().bytesReceived.fetch_add(piece.size(), std::memory_order_relaxed);
      if (header.kind == wire::Kind::kRefused) {
        dropAnswer(from.peer(), header.callId); // parts of the answer may have come before it failed
      }
      events_.addControl(from.peer(), {header.kind, header.callId, std::move(piece.data)});
  }
}

void Inbox::assemble(Connection& from, const wire::Header& header, wire::Piece piece) {
  wire::Assembled assembled;
  std::vector<wire::Piece> rejected;
  switch (assembler_.add(header, std::move(piece), assembled, rejected)) {
    case wire::Assembler::Outcome::kIncomplete:
      break;
    case wire::Assembler::Outcome::kWhole:
      onAssembled(from, std::move(assembled));
      break;
    case wire::Assembler::Outcome::kGivenUp:
      receiver_.release(rejected);
      break;
    case wire::Assembler::Outcome::kRejected:
      receiver_.release(rejected);
      events_.addRejection(
          from.peer(), header, {ErrorCode::kProtocol, "malformed message: its parts contradict each other"});
      break;
  }
}

void Inbox::onAssembled(Connection& from, wire::Assembled assembled) {
  uint64_t bytes = 0;
  bool isRendezvous = false;
  assembled.forEachPiece([&](const wire::Piece& piece) {
    bytes += piece.rendezvousBytes;
    isRendezvous |= piece.isRendezvous();
  });
  if (isRendezvous && assembled.header.kind == wire::Kind::kPut) {
    onPutAnnounced(from, std::move(assembled), bytes);
    return;
  }
  if (isRendezvous) {
    const uint64_t deviceBytes = receiver_.deviceBytesOf(assembled);
    queueFor(assembled.header.kind).push_back({&from, std::move(assembled), bytes - deviceBytes, deviceBytes});
    return; // admitWaiting() admits it, unless its call was given up
  }
  IncomingMessage message;
  message.from = &from.peer();
  message.header = assembled.header;
  message.eagerBody = std::move(assembled.body.data);
  events_.addMessage(std::move(message));
}

void Inbox::onPutAnnounced(Connection& from, wire::Assembled assembled, uint64_t bytes) {
  if (assembled.body.isRendezvous()) {
    receiver_.release(assembled);
    rejectFrame(FrameFault::kMalformed, "a malformed frame: the body of a put comes by rendezvous");
    return;
  }
  std::vector<uint64_t> spanBytes;
  spanBytes.reserve(assembled.spans.size());
  for (const wire::Assembled::Span& span : assembled.spans) {
    spanBytes.push_back(span.bytes);
  }
  PutHandler::Verdict verdict =
      handlers_.puts->onPutAnnounced(from.peer(), assembled.header, assembled.body.data, spanBytes);
  const uint64_t deviceBytes = receiver_.deviceBytesOf(assembled);
  Receiver::Announced announced{&from, std::move(assembled), bytes - deviceBytes, deviceBytes, std::move(verdict.into)};
  if (verdict.fate == PutHandler::Verdict::Fate::kReceive) {
    waitingPuts_.push_back(std::move(announced));
    return;
  }
  if (verdict.fate == PutHandler::Verdict::Fate::kHold) {
    const std::pair<const Peer*, uint64_t> number(&from.peer(), announced.assembled.header.callId);
    if (heldPuts_.try_emplace(number, std::move(announced)).second) {
      return;
    }
    rejectFrame(FrameFault::kMalformed, "a malformed frame: a put with the number of another one");
  }
  IncomingMessage dropped;
  dropped.from = &from.peer();
  dropped.header = announced.assembled.header; // NOLINT(bugprone-use-after-move): only moved from where it was placed
  dropped.eagerBody = std::move(announced.assembled.body.data);
  receiver_.release(announced.assembled);
  events_.addMessage(std::move(dropped));
}

void Inbox::receivePut(Peer& from, uint64_t number, std::vector<c10::DataPtr> into) {
  assertHoldsWorkerLock();
  auto held = heldPuts_.extract({&from, number});
  if (held.empty()) { // the value is gone with its sender
    wire::Header header;
    header.kind = wire::Kind::kPut;
    header.callId = number;
    events_.addRejection(from, header, {ErrorCode::kPeerFailed, from.describe() + " is gone"});
    return;
  }
  held.mapped().into = std::move(into);
  waitingPuts_.push_back(std::move(held.mapped()));
}

void Inbox::dropPut(Peer& from, uint64_t number) {
  assertHoldsWorkerLock();
  if (auto held = heldPuts_.extract({&from, number})) {
    receiver_.release(held.mapped().assembled);
  }
}

void Inbox::onCancel(Connection& from, uint64_t callId) {
  // The request may be incomplete, may wait for the window, or may be arriving. A request that has arrived whole stays:
  // RequestServer drops it when its deadline has passed.
  std::vector<wire::Piece> dropped;
  assembler_.cancel(from.peer().member().session, wire::Kind::kRequest, callId, dropped);
  receiver_.release(dropped);
  std::erase_if(waitingRequests_, [&](Receiver::Announced& waiting) {
    const bool isCanceled = waiting.from == &from && waiting.assembled.header.callId == callId;
    if (isCanceled) {
      receiver_.release(waiting.assembled);
    }
    return isCanceled;
  });
  receiver_.cancel(from, callId);
}

void Inbox::dropAnswer(const Peer& from, uint64_t callId) {
  assertHoldsWorkerLock();
  std::vector<wire::Piece> dropped;
  assembler_.cancel(from.member().session, wire::Kind::kResponse, callId, dropped);
  receiver_.release(dropped);
}

void Inbox::admitWaiting() {
  assertHoldsWorkerLock();
  receiver_.beginRound();
  // Responses first: handlers of requests wait for them.
  admitWaiting(waitingResponses_);
  admitWaiting(waitingPuts_);
  admitWaiting(waitingRequests_);
  updateWaitingCount();
}

void Inbox::admitWaiting(std::deque<Receiver::Announced>& queue) {
  while (!queue.empty()) {
    Receiver::Announced& first = queue.front();
    if (receiver_.isAbandoned(first.from->peer(), first.assembled.header)) {
      receiver_.release(first.assembled);
      queue.pop_front();
      continue;
    }
    // Stores the count before the attempt. A release in between then sees that a message waits, and wakes this worker.
    // If the attempt fails, a release, the end of a receive, or Messenger::checkWindow() brings the next attempt.
    updateWaitingCount();
    Admission admission;
    const wire::Kind kind = first.assembled.header.kind;
    // A response may wait here while requests are received, but not for long: isBusy() does not count slow messages.
    if (receiver_.isBusy(first.bytes) || receiver_.areDevicesBusy(first.deviceBytes) ||
        (kind != wire::Kind::kPut && // its handler bounds the memory of values
         !window_->tryAdmit(kind == wire::Kind::kResponse, first.bytes, admission, first.deviceBytes))) {
      break; // the queue keeps its order, so small messages do not starve a large one
    }
    Receiver::Announced admitted = std::move(first);
    queue.pop_front();
    receiver_.start(std::move(admitted), std::move(admission));
  }
}

void Inbox::admitStalled() {
  assertHoldsWorkerLock();
  // Responses do not stall. Their shares come back when they are decoded, and decoding never waits for a handler.
  if (waitingRequests_.empty()) {
    return;
  }
  Receiver::Announced admitted = std::move(waitingRequests_.front());
  waitingRequests_.pop_front();
  Admission admission;
  window_->admit(false, admitted.bytes, admission, admitted.deviceBytes);
  receiver_.start(std::move(admitted), std::move(admission));
  updateWaitingCount();
}

void Inbox::updateWaitingCount() {
  window_->waitingMessages.store(waitingRequests_.size() + waitingResponses_.size() + waitingPuts_.size());
}

void Inbox::dropPeer(const Peer& peer) {
  assertHoldsWorkerLock();
  std::vector<wire::Piece> dropped;
  assembler_.dropSession(peer.member().session, dropped);
  receiver_.release(dropped);
  const Error gone(ErrorCode::kPeerFailed, peer.describe() + " is gone");
  const auto isDropped = [&](Receiver::Announced& waiting) {
    const bool isOfPeer = &waiting.from->peer() == &peer;
    if (isOfPeer) {
      receiver_.release(waiting.assembled);
    }
    return isOfPeer;
  };
  std::erase_if(waitingRequests_, isDropped);
  std::erase_if(waitingResponses_, isDropped);
  std::erase_if(waitingPuts_, [&](Receiver::Announced& waiting) {
    if (!isDropped(waiting)) {
      return false;
    }
    // Channel has given the value to a wait already.
    events_.addRejection(waiting.from->peer(), waiting.assembled.header, gone);
    return true;
  });
  for (auto held = heldPuts_.begin(); held != heldPuts_.end();) {
    held = isDropped(held->second) ? heldPuts_.erase(held) : std::next(held);
  }
  if (peer.connection != nullptr) {
    receiver_.dropPeer(*peer.connection);
  }
}

} // namespace torch_ucx_rpc
