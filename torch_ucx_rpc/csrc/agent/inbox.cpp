#include "agent/inbox.h"

#include "wire/body.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
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
    refuseFrame(Refusal::kMalformed, error.message());
    return false;
  }
  if (header.targetSession != session_) {
    refuseFrame(Refusal::kOtherLife, "a frame meant for a worker that had this address before, or of another job");
    return false;
  }
  return true;
}

Peer* Inbox::findSender(const wire::Header& header, uint64_t dataBytes, std::span<const std::byte> data) {
  Peer* from = directory_.findSession(header.sourceSession);
  if (from == nullptr || from->member().rank != static_cast<int64_t>(header.sourceRank)) {
    if (from == nullptr && header.kind == wire::Kind::kGoodbye && acceptsJoins_ && !joinOpener_.has_value()) {
      return nullptr; // it asked to join, and learned that this worker is leaving before it was admitted
    }
    refuseFrame(Refusal::kStranger, "a frame from a process that is not a worker of this job");
    return nullptr;
  }
  if (from->opener.has_value()) {
    if (!from->opener->isGenuine(header, dataBytes, data)) {
      refuseFrame(
          Refusal::kForged, "a frame in the name of " + from->describe() + " that is not sealed with the job's secret");
      return nullptr;
    }
    if (!from->opener->isNew(header)) {
      refuseFrame(Refusal::kReplayed, "a frame of " + from->describe() + " that has come before");
      return nullptr;
    }
  }
  return from;
}

void Inbox::refuseFrame(Refusal refusal, const std::string& what) {
  countRefused();
  if (!hasWarned_.test(static_cast<size_t>(refusal))) {
    hasWarned_.set(static_cast<size_t>(refusal));
    deliveries_.warning += (deliveries_.warning.empty() ? "refused " : "; refused ") + what +
        " (more of the kind are only counted: agent.frames_refused in get_metrics)";
  }
}

void Inbox::onEager(std::span<const std::byte> headerBytes, std::span<const std::byte> bytes) {
  wire::Header header;
  if (!checkHeader(headerBytes, header)) {
    return;
  }
  if (header.kind == wire::Kind::kJoin && acceptsJoins_) {
    onJoin(header, bytes);
    return;
  }
  const bool isBody = header.index == wire::kBodyIndex;
  if (Peer* from = findSender(header, bytes.size(), isBody ? bytes : std::span<const std::byte>())) {
    add(*from, header, {Bytes(bytes), nullptr, 0});
  }
}

void Inbox::onJoin(const wire::Header& header, std::span<const std::byte> record) {
  if (joinOpener_.has_value() && !joinOpener_->isGenuine(header, record.size(), record)) {
    refuseFrame(Refusal::kForged, "a process that wants to join the group and does not have the job's secret");
  } else if (directory_.findSession(header.sourceSession) != nullptr) {
    refuseFrame(Refusal::kReplayed, "a join of a process that has joined before");
  } else {
    deliveries_.joins.push_back({header.sourceSession, Bytes(record)});
  }
}

void Inbox::onParked(std::span<const std::byte> headerBytes, void* parked, uint64_t bytes) {
  wire::Header header;
  wire::Piece piece{{}, parked, bytes};
  Peer* from = nullptr;
  if (checkHeader(headerBytes, header)) {
    if (header.kind == wire::Kind::kRequest || header.kind == wire::Kind::kResponse) {
      from = findSender(header, bytes, {});
    } else {
      refuseFrame(Refusal::kMalformed, "a malformed frame: only requests and responses come by rendezvous");
    }
  }
  if (from == nullptr) {
    refuse(piece);
    return;
  }
  add(*from, header, std::move(piece));
}

void Inbox::onEndpointFailed(EndpointId endpoint, const Error& error) {
  if (Peer* peer = outbox_.peerOf(endpoint)) {
    deliveries_.failures.push_back({peer, error});
  }
}

void Inbox::add(Peer& from, const wire::Header& header, wire::Piece piece) {
  if (!from.isThere()) { // its calls have failed here already: it must not be half alive
    refuse(piece);
    return;
  }
  from.silence.isBroken = true;
  switch (header.kind) {
    case wire::Kind::kCancel:
      refuse(piece);
      onCancel(from, header.callId);
      return;
    case wire::Kind::kPing:
      refuse(piece);
      pings_.push_back(&from);
      return;
    case wire::Kind::kPong:
      refuse(piece);
      return;
    default:
      break;
  }
  from.bytesReceived.fetch_add(piece.size(), std::memory_order_relaxed);
  wire::Assembled assembled;
  std::vector<wire::Piece> rejected;
  switch (assembler_.add(header, std::move(piece), assembled, rejected)) {
    case wire::Assembler::Outcome::kIncomplete:
      break;
    case wire::Assembler::Outcome::kWhole:
      onAssembled(from, std::move(assembled));
      break;
    case wire::Assembler::Outcome::kGivenUp:
      for (wire::Piece& part : rejected) {
        refuse(part);
      }
      break;
    case wire::Assembler::Outcome::kRejected:
      for (wire::Piece& part : rejected) {
        refuse(part);
      }
      deliveries_.rejections.push_back(
          {&from, header, {ErrorCode::kProtocol, "malformed message: its parts contradict each other"}});
      break;
  }
}

void Inbox::onAssembled(Peer& from, wire::Assembled assembled) {
  if (assembled.header.kind == wire::Kind::kResponse && !isAwaited_(from, assembled.header.callId)) {
    refuseAll(assembled); // a late answer: its caller has been told otherwise
    return;
  }
  if (hasParked(assembled)) {
    const uint64_t bytes = parkedBytes(assembled);
    queueFor(assembled.header.kind).push_back({&from, std::move(assembled), bytes});
    return; // settle() admits it
  }
  IncomingMessage message;
  message.from = &from;
  message.header = assembled.header;
  message.eagerBody = std::move(assembled.body.data);
  message.spans.reserve(assembled.spans.size());
  for (const wire::Assembled::Span& span : assembled.spans) { // small spans that came eagerly
    c10::DataPtr data = pool_.allocate(span.bytes);
    for (const wire::Piece& piece : span.pieces) {
      std::copy_n(piece.data.data(), piece.data.size(), static_cast<std::byte*>(data.get()) + piece.offset);
    }
    message.spans.push_back({std::move(data), span.bytes});
  }
  deliveries_.messages.push_back(std::move(message));
}

void Inbox::onCancel(const Peer& from, uint64_t callId) {
  std::vector<wire::Piece> dropped;
  assembler_.cancel(from.member().session, wire::Kind::kRequest, callId, dropped);
  for (wire::Piece& piece : dropped) {
    refuse(piece);
  }
  std::erase_if(waitingRequests_, [&](Waiting& waiting) {
    const bool isCanceled = waiting.from == &from && waiting.assembled.header.callId == callId;
    if (isCanceled) {
      refuseAll(waiting.assembled);
    }
    return isCanceled;
  });
  std::erase_if(sources_[&from].waiting, [&](std::list<Receiving>::iterator receiving) {
    const wire::Header& header = receiving->message.header;
    const bool isCanceled = header.kind == wire::Kind::kRequest && header.callId == callId;
    if (isCanceled) {
      giveUpRest(receiving, {ErrorCode::kCanceled, "its call was given up"});
    }
    return isCanceled;
  });
}

void Inbox::refuse(wire::Piece& piece) {
  if (piece.parked != nullptr) {
    toRefuse_.push_back(std::exchange(piece.parked, nullptr));
  }
}

void Inbox::refuseAll(wire::Assembled& assembled) {
  refuse(assembled.body);
  for (wire::Assembled::Span& span : assembled.spans) {
    for (wire::Piece& piece : span.pieces) {
      refuse(piece);
    }
  }
}

bool Inbox::isParked(const wire::Piece& piece) {
  return piece.parked != nullptr;
}

bool Inbox::hasParked(const wire::Assembled& assembled) {
  const auto& spans = assembled.spans;
  return isParked(assembled.body) || std::any_of(spans.begin(), spans.end(), [](const wire::Assembled::Span& span) {
           return std::any_of(span.pieces.begin(), span.pieces.end(), isParked);
         });
}

uint64_t Inbox::parkedBytes(const wire::Assembled& assembled) {
  uint64_t bytes = assembled.body.parkedBytes;
  for (const wire::Assembled::Span& span : assembled.spans) {
    for (const wire::Piece& piece : span.pieces) {
      bytes += piece.parkedBytes;
    }
  }
  return bytes;
}

void Inbox::settle() {
  hasFinished_ = false;
  std::erase_if(starting_, [this](std::list<Receiving>::iterator receiving) { return receiveIfFree(receiving); });
  admitWaiting(waitingResponses_);
  admitWaiting(waitingRequests_);
  updateWaitingCount();
  for (Source* source : std::exchange(due_, {})) {
    askFor(*source);
  }
  for (void* parked : std::exchange(toRefuse_, {})) {
    transport_.refuse(parked);
  }
}

void Inbox::admitWaiting(std::deque<Waiting>& queue) {
  while (!queue.empty()) {
    Waiting& first = queue.front();
    const bool isResponse = first.assembled.header.kind == wire::Kind::kResponse;
    if (isResponse && !isAwaited_(*first.from, first.assembled.header.callId)) {
      refuseAll(first.assembled);
      queue.pop_front();
      continue;
    }
    // Announced before it is tried: a release that comes in between then knows that it must call.
    updateWaitingCount();
    Admission admission;
    if (isBusyReceiving(first.bytes) || !window_->tryAdmit(isResponse, first.bytes, admission)) {
      break; // in order: a large message is not overtaken for ever by small ones
    }
    Waiting admitted = std::move(first);
    queue.pop_front();
    start(std::move(admitted), std::move(admission));
  }
}

bool Inbox::isBusyReceiving(uint64_t more) const {
  uint64_t bytes = 0;
  const Clock::time_point now = Clock::now();
  for (const Receiving& receiving : receiving_) {
    bytes += now - receiving.began < kSlow ? receiving.bytes : 0;
  }
  return bytes != 0 && bytes + more > kReceivingBytes;
}

void Inbox::admitStalled() {
  if (waitingRequests_.empty()) {
    return;
  }
  Waiting admitted = std::move(waitingRequests_.front());
  waitingRequests_.pop_front();
  Admission admission;
  window_->admit(false, admitted.bytes, admission);
  start(std::move(admitted), std::move(admission));
  updateWaitingCount();
}

void Inbox::updateWaitingCount() {
  window_->waitingMessages.store(waitingRequests_.size() + waitingResponses_.size());
}

void Inbox::start(Waiting waiting, Admission admission) {
  const auto receiving = receiving_.emplace(receiving_.end());
  window_->receivingMessages.store(receiving_.size());
  receiving->bytes = waiting.bytes;
  receiving->began = Clock::now();
  receiving->assembled = std::move(waiting.assembled);
  IncomingMessage& message = receiving->message;
  wire::Assembled& assembled = receiving->assembled;
  message.from = waiting.from;
  message.header = assembled.header;
  message.admission = std::move(admission);
  message.eagerBody = std::move(assembled.body.data);
  message.pooledBodyBytes = assembled.body.parkedBytes;
  try {
    if (assembled.body.parked != nullptr) {
      message.pooledBody = pool_.allocate(assembled.body.parkedBytes);
    }
    allocateSpans(*receiving);
  } catch (const std::bad_alloc&) {
    receiving->error = outOfMemoryFor(waiting.bytes);
  } catch (const std::exception& failure) {
    receiving->error = deviceFailed(failure);
  }
  if (!receiveIfFree(receiving)) {
    starting_.push_back(receiving);
  }
}

void Inbox::allocateSpans(Receiving& receiving) {
  IncomingMessage& message = receiving.message;
  const std::vector<wire::Assembled::Span>& spans = receiving.assembled.spans;
  message.spans.resize(spans.size());
  if (!devices_().empty()) {
    allocateOnDevices(receiving);
  }
  for (size_t index = 0; index < spans.size(); ++index) {
    IncomingMessage::Span& span = message.spans[index];
    span.bytes = spans[index].bytes;
    if (!span.data) {
      span.data = pool_.allocate(span.bytes);
    }
  }
}

void Inbox::allocateOnDevices(Receiving& receiving) {
  const std::vector<wire::Assembled::Span>& spans = receiving.assembled.spans;
  Devices used;
  for (const wire::StorageRecord& storage : wire::storagesOf(receiving.message.eagerBody)) {
    const c10::Device* device = findDevice(devices_(), storage.deviceType, storage.deviceIndex);
    if (device == nullptr || storage.span >= spans.size()) {
      continue; // for the host, or malformed: then it is refused when it is decoded
    }
    const wire::Assembled::Span& span = spans[storage.span];
    if (!std::all_of(span.pieces.begin(), span.pieces.end(), isParked)) {
      continue; // it goes there when it is decoded
    }
    receiving.message.spans[storage.span].data = deviceMemory_.allocate(*device, span.bytes);
    if (std::find(used.begin(), used.end(), *device) == used.end()) {
      used.push_back(*device);
    }
  }
  receiving.before = deviceMemory_.earlierWork(used);
}

bool Inbox::receiveIfFree(std::list<Receiving>::iterator receiving) {
  if (receiving->error) {
    reject(receiving, std::move(receiving->error));
    return true;
  }
  try {
    if (!receiving->before.isDone()) {
      return false;
    }
  } catch (const std::exception& failure) {
    reject(receiving, deviceFailed(failure));
    return true;
  }
  const wire::Assembled assembled = std::move(receiving->assembled);
  const IncomingMessage& message = receiving->message;
  addPart(*receiving, assembled.body, message.pooledBody);
  for (size_t index = 0; index < assembled.spans.size(); ++index) {
    for (const wire::Piece& piece : assembled.spans[index].pieces) {
      addPart(*receiving, piece, message.spans[index].data);
    }
  }
  Source& source = sources_[message.from];
  source.waiting.push_back(receiving);
  setDue(source);
  return true;
}

void Inbox::reject(std::list<Receiving>::iterator receiving, Error error) {
  refuseAll(receiving->assembled);
  deliveries_.rejections.push_back(
      {receiving->message.from, receiving->message.header, std::move(error), std::move(receiving->message.admission)});
  forget(receiving);
}

void Inbox::addPart(Receiving& receiving, const wire::Piece& piece, const c10::DataPtr& into) {
  std::byte* const begin = static_cast<std::byte*>(into.get()) + piece.offset;
  if (isParked(piece)) {
    receiving.parts.push_back(
        {piece.parked, begin, piece.parkedBytes, into.device().is_cpu() ? Memory::kHost : Memory::kDevice});
  } else if (into) { // else it is the body's
    std::copy_n(piece.data.data(), piece.data.size(), begin);
  }
}

void Inbox::setDue(Source& source) {
  if (!std::exchange(source.isDue, true)) {
    due_.push_back(&source);
  }
}

void Inbox::askFor(Source& source) {
  uint64_t bytes = source.askedBytes;
  size_t pieces = source.askedPieces;
  std::erase_if(source.waiting, [this](std::list<Receiving>::iterator receiving) {
    const bool isVain = receiving->error || !isWanted(receiving->message);
    if (isVain) {
      giveUpRest(receiving, {ErrorCode::kCanceled, "its call was given up"});
    }
    return isVain;
  });
  while (!source.waiting.empty()) {
    const auto entry = source.next();
    const std::list<Receiving>::iterator receiving = *entry;
    const uint64_t more = receiving->parts[receiving->begun].bytes;
    if (pieces >= kAskedPieces && bytes + more > kAskedBytes) {
      break;
    }
    ++pieces;
    bytes += more;
    source.isOldestsTurn = !source.isOldestsTurn;
    if (receiving->begun + 1 == receiving->parts.size()) {
      source.waiting.erase(entry);
    }
    receivePart(source, receiving);
  }
  source.isDue = false;
  if (!source.waiting.empty() && source.askedPieces < pieces) { // some were there at once
    setDue(source);
  }
}

bool Inbox::isWanted(const IncomingMessage& message) {
  return message.header.kind != wire::Kind::kResponse || isAwaited_(*message.from, message.header.callId);
}

void Inbox::receivePart(Source& source, std::list<Receiving>::iterator receiving) {
  const Part& part = receiving->parts[receiving->begun++];
  const uint64_t bytes = part.bytes;
  ++receiving->unfinished;
  ++source.askedPieces;
  source.askedBytes += bytes;
  transport_.receive(
      part.parked,
      part.into,
      bytes,
      [this, &source, receiving, bytes](Error error) {
        --source.askedPieces;
        source.askedBytes -= bytes;
        if (!source.waiting.empty()) {
          setDue(source);
        }
        if (!error) {
          receiving->message.from->silence.isBroken = true;
        } else if (!receiving->error) {
          receiving->error = std::move(error);
        }
        --receiving->unfinished;
        finishIfDone(receiving);
      },
      part.memory);
}

void Inbox::giveUpRest(std::list<Receiving>::iterator receiving, const Error& why) {
  if (!receiving->error) {
    receiving->error = why;
  }
  for (; receiving->begun != receiving->parts.size(); ++receiving->begun) {
    toRefuse_.push_back(receiving->parts[receiving->begun].parked);
  }
  finishIfDone(receiving);
}

void Inbox::finishIfDone(std::list<Receiving>::iterator receiving) {
  if (receiving->unfinished != 0 || receiving->begun != receiving->parts.size()) {
    return;
  }
  if (receiving->isDropped) {
    forget(receiving);
    return;
  }
  IncomingMessage message = std::move(receiving->message);
  Error outcome = std::move(receiving->error);
  forget(receiving);
  if (outcome) {
    deliveries_.rejections.push_back({message.from, message.header, std::move(outcome), std::move(message.admission)});
  } else {
    deliveries_.messages.push_back(std::move(message));
  }
}

void Inbox::forget(std::list<Receiving>::iterator receiving) {
  (receiving->isDropped ? dropped_ : receiving_).erase(receiving);
  window_->receivingMessages.store(receiving_.size());
  hasFinished_ = true;
}

void Inbox::close() {
  const Error shutDown(ErrorCode::kShutDown, "RPC has been shut down on this worker");
  for (const std::list<Receiving>::iterator receiving : std::exchange(starting_, {})) {
    reject(receiving, shutDown);
  }
  for (auto& [peer, source] : sources_) {
    for (const std::list<Receiving>::iterator receiving : std::exchange(source.waiting, {})) {
      giveUpRest(receiving, shutDown);
    }
  }
}

void Inbox::dropPeer(const Peer& peer) {
  std::vector<wire::Piece> dropped;
  assembler_.dropSession(peer.member().session, dropped);
  for (wire::Piece& piece : dropped) {
    refuse(piece);
  }
  for (std::deque<Waiting>* queue : {&waitingRequests_, &waitingResponses_}) {
    std::erase_if(*queue, [&](Waiting& waiting) {
      if (waiting.from == &peer) {
        refuseAll(waiting.assembled);
      }
      return waiting.from == &peer;
    });
  }
  const Error gone(ErrorCode::kPeerFailed, peer.describe() + " is gone");
  std::erase_if(starting_, [&](std::list<Receiving>::iterator receiving) {
    const bool isOfPeer = receiving->message.from == &peer;
    if (isOfPeer) {
      reject(receiving, gone);
    }
    return isOfPeer;
  });
  sources_[&peer].waiting.clear();
  for (auto next = receiving_.begin(); next != receiving_.end();) {
    const auto receiving = next++;
    if (receiving->message.from != &peer) {
      continue;
    }
    // The transport may take its time; the window does not wait for it.
    IncomingMessage& message = receiving->message;
    deliveries_.rejections.push_back({message.from, message.header, gone, std::move(message.admission)});
    receiving->isDropped = true;
    dropped_.splice(dropped_.end(), receiving_, receiving);
    giveUpRest(receiving, gone);
  }
  window_->receivingMessages.store(receiving_.size());
}

} // namespace torch_ucx_rpc
