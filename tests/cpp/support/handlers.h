#pragma once

// Event handlers that note their events. Tests override the ones that they need.

#include "messaging/event_handlers.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

class Handlers : public AnswerHandler,
                 public RequestHandler,
                 public PeerHandler,
                 public GroupHandler,
                 public PutHandler {
 public:
  // AnswerHandler.
  bool isAwaited(const Peer& /*from*/, uint64_t callId) const override {
    return callId != abandonedCall;
  }
  void onAnswer(IncomingMessage answer, const std::optional<Driver>& driver, WorkAtEnd& atEnd) override {
    note("answer", answer.header.callId);
    if (driver && driver->awaitedCall == answer.header.callId) {
      atEnd.emplace_back([this, id = answer.header.callId] { note("completed by the driver", id); });
    }
    answers.push_back(std::move(answer));
  }
  void onRefused(Peer& /*by*/, uint64_t callId, const Error& why) override {
    note("refused: " + why.message(), callId);
  }
  void onAnswerRejected(Peer& /*from*/, uint64_t callId, const Error& why) override {
    note("answer rejected: " + why.message(), callId);
  }
  void onRequestNotSent(Peer& /*to*/, uint64_t callId, const Error& why) override {
    note("request not sent: " + why.message(), callId);
  }

  // RequestHandler.
  bool mayRunOnDriver(const IncomingMessage& request) const override {
    return request.header.callId == shortRequest;
  }
  void onRequest(IncomingMessage request) override {
    note("request", request.header.callId);
    requests.push_back(std::move(request));
  }
  void runOnDriver(IncomingMessage request) override {
    note("request on the driver", request.header.callId);
  }
  void onRequestRejected(Peer& /*from*/, uint64_t callId, const Error& why) override {
    note("request rejected: " + why.message(), callId);
  }
  void onAnswerNotSent(Peer& /*to*/, uint64_t callId, const Error& why, bool hasLeftInPart) override {
    note((hasLeftInPart ? "answer cut: " : "answer not sent: ") + why.message(), callId);
  }

  // PeerHandler.
  void onGoodbye(Peer& from) override {
    note("goodbye", static_cast<uint64_t>(from.member().rank));
  }
  void onFailure(Peer& peer, Error why) override {
    note("failure: " + why.message(), static_cast<uint64_t>(peer.member().rank));
  }
  void onBroken(Peer& peer) override {
    note("broken", static_cast<uint64_t>(peer.member().rank));
  }
  void onControlNotSent(Peer& to, const Error& why) override {
    note("control not sent: " + why.message(), static_cast<uint64_t>(to.member().rank));
  }

  // GroupHandler.
  void onJoin(uint64_t session, Bytes /*record*/) override {
    note("join", session);
  }
  void onLeave(Peer& from) override {
    note("leave", static_cast<uint64_t>(from.member().rank));
  }
  void onAcknowledge(Peer& from) override {
    note("acknowledge", static_cast<uint64_t>(from.member().rank));
  }
  void onBarrierArrive(Peer& /*from*/, uint64_t round, const Barrier::Arrivals& /*arrivals*/) override {
    note("arrive", round);
  }
  void onBarrierRelease(Peer& /*from*/, uint64_t round, const Barrier::Result& /*result*/) override {
    note("release", round);
  }

  // PutHandler.
  Verdict onPutAnnounced(
      Peer& /*from*/,
      const wire::Header& header,
      std::span<const std::byte> /*body*/,
      std::span<const uint64_t> /*spanBytes*/) override {
    note("put announced", header.callId);
    return {fateOfPuts, {}};
  }
  void onPut(IncomingMessage value, const std::optional<Driver>& /*driver*/) override {
    note("put", value.header.callId);
  }
  void onPutRejected(Peer& /*from*/, uint64_t number, const Error& why) override {
    note("put rejected: " + why.message(), number);
  }
  void onPutSent(Peer& /*to*/, uint64_t number, const Error& error) override {
    note(error ? "put not sent: " + error.message() : "put sent", number);
  }
  void onTaken(Peer& /*from*/, uint64_t bytes) override {
    note("taken", bytes);
  }
  void onPutRefused(Peer& /*by*/, const std::string& group, uint64_t epoch) override {
    note("put refused in " + group, epoch);
  }

  // Returns the events since the last call, such as "request 7".
  std::vector<std::string> takeNotes() {
    return std::exchange(notes_, {});
  }

  EventHandlers all{this, this, this, this, this};
  uint64_t abandonedCall = ~0ull; // the caller of this call has given up
  uint64_t shortRequest = ~0ull; // a driver may run this request itself
  Verdict::Fate fateOfPuts = Verdict::Fate::kReceive;
  std::vector<IncomingMessage> answers;
  std::vector<IncomingMessage> requests;

 private:
  void note(const std::string& what, uint64_t number) {
    notes_.push_back(what + " " + std::to_string(number));
  }

  std::vector<std::string> notes_;
};

} // namespace torch_ucx_rpc
