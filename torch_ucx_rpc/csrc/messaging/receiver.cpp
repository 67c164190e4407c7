#include "messaging/receiver.h"

#include "wire/body.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// True for errors of an endpoint. Other errors are those of memory, of devices or of the data.
bool mayComeAgain(const Error& error) {
  return error.code() == ErrorCode::kPeerFailed || error.code() == ErrorCode::kTimedOut ||
      error.code() == ErrorCode::kCanceled;
}

} // namespace

bool Receiver::isBusy(uint64_t Receiving::* bytes, uint64_t more, uint64_t limit, Clock::time_point now) const {
  uint64_t sum = 0;
  for (const Receiving& receiving : receiving_) {
    sum += now - receiving.began < kSlow ? receiving.*bytes : 0;
  }
  // A message of any size may be received alone.
  return sum != 0 && more != 0 && sum + more > limit;
}

// Leaves out staged bytes, which take host memory.
uint64_t Receiver::deviceBytesOf(const wire::Assembled& assembled) const {
  uint64_t sum = 0;
  for (const DeviceAllocation::Span& span : planDevices(assembled.body.data, assembled.spans)) {
    sum += span.isStaging ? 0 : span.bytes;
  }
  return sum;
}

void Receiver::start(Announced announced, Admission admission) {
  const Entry receiving = receiving_.emplace(receiving_.end());
  window_->receivingMessages.store(receiving_.size());
  receiving->bytes = announced.bytes;
  receiving->deviceBytes = announced.deviceBytes;
  receiving->began = Clock::now();
  receiving->assembled = std::move(announced.assembled);
  receiving->into = std::move(announced.into);
  IncomingMessage& message = receiving->message;
  wire::Piece& body = receiving->assembled.body;
  message.from = &announced.from->peer();
  message.header = receiving->assembled.header;
  message.admission = std::move(admission);
  message.eagerBody = std::move(body.data);
  message.pooledBodyBytes = body.rendezvousBytes;
  if (body.isRendezvous() && !devices_.get().empty()) {
    receiving->stage = Stage::kBody;
  }
  announced.from->incoming.starting.push_back(receiving);
  connections_.makeReady(*announced.from);
}

void Receiver::planMemory(Receiving& receiving) {
  IncomingMessage& message = receiving.message;
  if (receiving.assembled.body.isRendezvous()) {
    message.pooledBody = HostPool::instance().allocate(message.pooledBodyBytes);
  }
  if (receiving.stage != Stage::kMemory) {
    return;
  }
  const std::vector<wire::Assembled::Span>& spans = receiving.assembled.spans;
  message.spans.resize(spans.size());
  std::vector<bool> isElsewhere(spans.size(), false);
  if (std::vector<DeviceAllocation::Span> planned = planDevices(message.body(), spans); !planned.empty()) {
    for (const DeviceAllocation::Span& span : planned) {
      isElsewhere[span.index] = true;
    }
    receiving.allocation = std::make_shared<DeviceAllocation>();
    receiving.allocation->spans = std::move(planned);
    receiving.allocation->isFromNeighbour = message.from->isNeighbour.load() && !message.from->isOverNetwork.load();
    // The allocators of devices may wait for Python, so they are not asked under the worker lock.
    events_.addWork([allocation = receiving.allocation, &transport = transport_, onAllocated = onAllocated_] {
      allocation->run(transport);
      onAllocated();
    });
  }
  for (size_t index = 0; index < spans.size(); ++index) {
    message.spans[index].bytes = spans[index].bytes;
    if (isElsewhere[index]) {
      continue;
    }
    const bool isGiven = index < receiving.into.size() && receiving.into[index];
    message.spans[index].data =
        isGiven ? std::move(receiving.into[index]) : HostPool::instance().allocate(spans[index].bytes);
  }
}

std::vector<DeviceAllocation::Span> Receiver::planDevices(
    std::span<const std::byte> body, const std::vector<wire::Assembled::Span>& spans) const {
  std::vector<DeviceAllocation::Span> planned;
  if (devices_.get().empty()) {
    return planned;
  }
  std::vector<bool> isPlanned(spans.size(), false);
  for (const wire::StorageRecord& storage : wire::storagesOf(body)) {
    const c10::Device* device = findDevice(devices_.get(), storage.deviceType, storage.deviceIndex);
    if (device == nullptr || storage.span >= spans.size()) {
      continue; // for the host, or malformed: the decoder refuses it then
    }
    const wire::Assembled::Span& span = spans[storage.span];
    if (storage.bytes != span.bytes || isPlanned[storage.span]) {
      continue; // a pack: the decoder copies each of its storages to the device
    }
    // UCX would copy bytes from host memory to the device in small pieces, under the worker lock.
    const bool isStaging = (storage.flags & wire::kFromHost) != 0 || transport_.deviceMemoryRefusal();
    isPlanned[storage.span] = true;
    planned.push_back({storage.span, *device, isStaging, span.bytes, {}});
  }
  return planned;
}

bool Receiver::takeMemory(Receiving& receiving) {
  if (receiving.allocation == nullptr) {
    return true;
  }
  if (!receiving.allocation->isDone.load()) {
    return false;
  }
  const std::shared_ptr<DeviceAllocation> allocation = std::move(receiving.allocation);
  if (allocation->failure != nullptr) {
    std::rethrow_exception(allocation->failure);
  }
  for (DeviceAllocation::Span& span : allocation->spans) {
    receiving.message.spans[span.index].data = std::move(span.data);
    receiving.message.spans[span.index].isBesidePool = span.isBesidePool;
  }
  receiving.pendingWork = std::move(allocation->earlierWork);
  return true;
}

void Receiver::release(wire::Piece& piece) {
  if (piece.isRendezvous()) {
    settle(*static_cast<Announcement*>(std::exchange(piece.rendezvous, nullptr)));
  }
}

void Receiver::releaseHandle(void* rendezvous) {
  if (rendezvous != nullptr) {
    toRelease_.push_back(rendezvous);
  }
}

void Receiver::settle(Announcement& announcement, uint64_t bytes) {
  Connection& from = *announcement.from;
  releaseHandle(announcement.rendezvous);
  releaseHandle(announcement.again);
  if (announcement.isNumbered && from.incoming.received.accept(announcement.key)) {
    connections_.noteArrival(from, bytes);
  }
  from.incoming.announced.erase(announcement.key);
}

void Receiver::release(std::vector<wire::Piece>& pieces) {
  for (wire::Piece& piece : pieces) {
    release(piece);
  }
}

void Receiver::release(wire::Assembled& assembled) {
  assembled.forEachPiece([this](wire::Piece& piece) { release(piece); });
}

void Receiver::startDeferred(Connection& connection) {
  // beginIfFree() adds nothing to `starting`. Only a message whose body came by rendezvous returns there, from a
  // callback.
  std::erase_if(connection.incoming.starting, [this](Entry receiving) { return beginIfFree(receiving); });
  if (!connection.incoming.starting.empty()) {
    connections_.keepLooking(connection);
  }
  // A receive that completes at once makes its connection ready again, for the next round.
  receiveNextParts(connection);
}

void Receiver::releaseAll() {
  for (void* rendezvous : std::exchange(toRelease_, {})) {
    transport_.release(rendezvous);
  }
}

bool Receiver::beginIfFree(Entry receiving) {
  try {
    // Each round comes here until the memory is there and free. The first round of a stage plans the memory.
    if (!std::exchange(receiving->isPlanned, true)) {
      planMemory(*receiving);
    }
    if (!takeMemory(*receiving) || !receiving->pendingWork.isDone()) {
      return false;
    }
  } catch (const std::bad_alloc&) {
    giveUp(receiving, outOfMemoryFor(receiving->bytes + receiving->deviceBytes));
    return true;
  } catch (const std::exception& failure) {
    giveUp(receiving, deviceFailed(failure));
    return true;
  }
  const IncomingMessage& message = receiving->message;
  wire::Piece body = std::exchange(receiving->assembled.body, {});
  if (body.isRendezvous()) {
    addPart(*receiving, body, message.pooledBody);
  }
  if (receiving->stage == Stage::kMemory) {
    receiving->stage = Stage::kSpans;
    const std::vector<wire::Assembled::Span> spans = std::exchange(receiving->assembled.spans, {});
    for (size_t index = 0; index < spans.size(); ++index) {
      for (const wire::Piece& piece : spans[index].pieces) {
        addPart(*receiving, piece, message.spans[index].data);
      }
    }
  }
  if (receiving->parts.empty()) { // the body came first, and there are no spans
    finishIfDone(receiving);
    return true;
  }
  message.from->connection->incoming.waiting.push_back(receiving);
  return true;
}

void Receiver::addPart(Receiving& receiving, const wire::Piece& piece, const c10::DataPtr& into) {
  receiving.parts.push_back(
      {static_cast<Announcement*>(piece.rendezvous),
       static_cast<std::byte*>(into.get()) + piece.offset,
       piece.rendezvousBytes,
       into.device().is_cpu() ? Memory::kHost : Memory::kDevice});
}

void Receiver::receiveNextParts(Connection& connection) {
  Connection::Incoming& source = connection.incoming;
  // Callbacks do not lower these counts, even if receives complete at once. So one call begins only a few receives, and
  // other operations get the worker lock in between.
  uint64_t bytes = source.inFlightBytes;
  size_t pieces = source.inFlightPieces;
  // The rest of a failed or abandoned message need not travel.
  static const Error givenUp = callGivenUp(); // made once, not in each round
  giveUpWhere(connection, givenUp, [this](const Receiving& receiving) {
    return receiving.error || isAbandoned(*receiving.message.from, receiving.message.header);
  });
  while (!source.waiting.empty()) {
    const auto next = source.next();
    const Entry receiving = *next;
    const Part* const part = nextPart(connection, *receiving);
    if (part == nullptr) {
      source.waiting.erase(next);
      source.stalled.push_back(receiving);
      connections_.makeReady(connection); // Messenger schedules Retries, which asks the peer for its parts
      continue;
    }
    const uint64_t more = part->bytes;
    // The more generous limit counts: two pieces of any size, or as many small ones as kInFlightBytes allows.
    if (pieces >= kInFlightPieces && bytes + more > kInFlightBytes) {
      break;
    }
    ++pieces;
    bytes += more;
    source.isOldestsTurn = !source.isOldestsTurn;
    if (receiving->begun + 1 == receiving->parts.size()) {
      source.waiting.erase(next); // now, since the end of this part may be the end of the message
    }
    receivePart(connection, receiving);
  }
}

void Receiver::receivePart(Connection& connection, Entry receiving) {
  // The callback outlives neither: connections stay, and a message stays in its list until all its begun parts are
  // done.
  const Part part = receiving->parts[receiving->begun++];
  const uint64_t bytes = part.bytes;
  part.announcement->isBeingReceived = true;
  if (part.announcement->isNumbered) {
    part.announcement->origin = transport_.originOf(part.announcement->rendezvous);
  }
  ++receiving->unfinished;
  ++connection.incoming.inFlightPieces;
  connection.incoming.inFlightBytes += bytes;
  transport_.receive(
      std::exchange(part.announcement->rendezvous, nullptr),
      part.into,
      bytes,
      [this, &connection, receiving, part, bytes](Error error) {
        --connection.incoming.inFlightPieces;
        connection.incoming.inFlightBytes -= bytes;
        if (error && mayComeAgain(error) && part.announcement->isNumbered && !receiving->isDropped &&
            !receiving->error && connection.mayResume()) {
          --receiving->unfinished;
          putBack(connection, receiving, part);
          return;
        }
        settle(*part.announcement, bytes);
        if (!connection.incoming.waiting.empty()) {
          connections_.makeReady(connection);
        }
        // A piece that has come is a sign of life, like a frame.
        if (!error) {
          connection.silence.heardSinceCheck = true;
        } else if (!receiving->error) {
          receiving->error = std::move(error);
        }
        --receiving->unfinished;
        finishIfDone(receiving);
      },
      part.memory);
}

Receiving::Part* Receiver::nextPart(const Connection& connection, Receiving& receiving) {
  const auto isThere = [&](const Part& part) {
    Announcement& announcement = *part.announcement;
    if (connection.incoming.isOutdated(announcement.endpoint)) {
      releaseHandle(std::exchange(announcement.rendezvous, nullptr));
    }
    return announcement.rendezvous != nullptr;
  };
  const auto begin = receiving.parts.begin() + static_cast<std::ptrdiff_t>(receiving.begun);
  const auto found = std::find_if(begin, receiving.parts.end(), isThere);
  if (found == receiving.parts.end()) {
    return nullptr;
  }
  std::iter_swap(begin, found);
  return &*begin;
}

void Receiver::putBack(Connection& connection, Entry receiving, Part part) {
  Announcement& announcement = *part.announcement;
  announcement.isBeingReceived = false;
  announcement.rendezvous = std::exchange(announcement.again, nullptr);
  announcement.endpoint = announcement.endpointAgain;
  Connection::Incoming& source = connection.incoming;
  const bool isWaiting = receiving->begun != receiving->parts.size();
  receiving->parts.push_back(part);
  if (!isWaiting) {
    source.waiting.push_back(receiving);
  } else if (announcement.rendezvous != nullptr) {
    std::ranges::move(std::exchange(source.stalled, {}), std::back_inserter(source.waiting));
  }
  connections_.makeReady(connection);
}

void Receiver::cancel(Connection& from, uint64_t callId) {
  giveUpWhere(from, callGivenUp(), [callId](const Receiving& receiving) {
    const wire::Header& header = receiving.message.header;
    return header.kind == wire::Kind::kRequest && header.callId == callId;
  });
}

template <typename IsOver>
void Receiver::giveUpWhere(Connection& connection, const Error& why, const IsOver& isOver) {
  Connection::Incoming& incoming = connection.incoming;
  for (std::vector<Entry>* entries : {&incoming.starting, &incoming.waiting, &incoming.stalled}) {
    std::erase_if(*entries, [&](Entry receiving) {
      const bool isHere = isOver(*receiving);
      if (isHere) {
        giveUp(receiving, why);
      }
      return isHere;
    });
  }
}

void Receiver::giveUp(Entry receiving, const Error& why) {
  if (!receiving->error) {
    receiving->error = why;
  }
  for (; receiving->begun != receiving->parts.size(); ++receiving->begun) {
    settle(*receiving->parts[receiving->begun].announcement);
  }
  finishIfDone(receiving);
}

void Receiver::finishIfDone(Entry receiving) {
  if (receiving->unfinished != 0 || receiving->begun != receiving->parts.size()) {
    return;
  }
  if (receiving->isDropped || receiving->error) {
    release(receiving->assembled); // it has the pieces that are not parts yet
  } else if (receiving->stage == Stage::kBody) { // the body now says where the spans go
    receiving->stage = Stage::kMemory;
    receiving->isPlanned = false;
    receiving->parts.clear();
    receiving->begun = 0;
    Connection& connection = *receiving->message.from->connection;
    connection.incoming.starting.push_back(receiving);
    connections_.makeReady(connection);
    return;
  }
  if (receiving->isDropped) { // dropPeer() has added its event
    forget(receiving);
    return;
  }
  IncomingMessage message = std::move(receiving->message);
  Error outcome = std::move(receiving->error);
  forget(receiving);
  if (outcome) {
    events_.addRejection(*message.from, message.header, std::move(outcome), std::move(message.admission));
  } else {
    events_.addMessage(std::move(message));
  }
}

void Receiver::forget(Entry receiving) {
  (receiving->isDropped ? dropped_ : receiving_).erase(receiving);
  window_->receivingMessages.store(receiving_.size());
  hasFinished_ = true;
}

void Receiver::dropPeer(Connection& connection) {
  const Error gone(ErrorCode::kPeerFailed, connection.peer().describe() + " is gone");
  // Clears these lists before the entries end, since the lists have iterators to the entries.
  connection.incoming.starting.clear();
  connection.incoming.waiting.clear();
  connection.incoming.stalled.clear();
  for (auto next = receiving_.begin(); next != receiving_.end();) {
    const Entry receiving = next++;
    if (receiving->message.from != &connection.peer()) {
      continue;
    }
    // The transport may keep the memory for a while, and calls back with the entry: splice() keeps iterators valid. The
    // window does not wait for that.
    IncomingMessage& message = receiving->message;
    events_.addRejection(*message.from, message.header, gone, std::move(message.admission));
    receiving->isDropped = true;
    dropped_.splice(dropped_.end(), receiving_, receiving);
    giveUp(receiving, gone);
  }
  window_->receivingMessages.store(receiving_.size());
}

void Receiver::close() {
  const Error shutDown(ErrorCode::kShutDown, "RPC has been shut down on this worker");
  for (const std::unique_ptr<Connection>& connection : connections_.all()) {
    giveUpWhere(*connection, shutDown, [](const Receiving& /*any*/) { return true; });
  }
}

} // namespace torch_ucx_rpc
