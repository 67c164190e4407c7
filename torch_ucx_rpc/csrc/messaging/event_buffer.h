#pragma once

#include "messaging/control_frames.h"
#include "messaging/dispatch_order.h"
#include "messaging/event_handlers.h"
#include "messaging/message.h"
#include "messaging/sent_messages.h"

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch_ucx_rpc {

// Buffers events. Inbox, Receiver, Outbox and PeerMonitor add them under the worker lock, by one method for each kind.
// The thread that releases the lock next takes them as a batch, and hands them to the handlers.
//
// The order within a batch:
// 1. Answers, values of channels, ends of sends, cut answers, rejections, joins and broken endpoints.
// 2. Requests and control frames in the order of arrival. Then failures of peers: what a peer sent before its end
//    counts.
// 3. Work that may block, then requests that the driver runs itself.
// 4. Answers to calls that the driver completes itself.
//
// DispatchOrder keeps the second group in order across batches too.
class EventBuffer {
 public:
  EventBuffer(const EventHandlers& handlers, SentMessages& sentMessages, Executor& executor, const Lifetime& lifetime)
      : handlers_(handlers), sentMessages_(sentMessages), executor_(executor), lifetime_(lifetime) {}

  // All of these need the worker lock:
  void addMessage(IncomingMessage message) {
    const wire::Kind kind = message.header.kind;
    if (kind == wire::Kind::kRequest) {
      pending().inOrder.emplace_back(std::move(message));
    } else {
      (kind == wire::Kind::kPut ? pending().puts : pending().answers).push_back(std::move(message));
    }
  }
  void addControl(Peer& from, ControlFrame frame) {
    pending().inOrder.emplace_back(Control{&from, std::move(frame)});
  }
  // Notes that the transport is done with a message. OutgoingMessage::error says whether it was sent.
  void addSent(std::unique_ptr<OutgoingMessage> message) {
    pending().sent.push_back(std::move(message));
  }
  // Adds an answer of which only some parts can leave. The caller must learn this first: the message ends only when the
  // caller releases these parts.
  void addCutAnswer(Peer& to, uint64_t callId, Error why) {
    pending().cutAnswers.push_back({&to, callId, std::move(why)});
  }
  // Adds a message that could not be received. The batch gives its share of the receive window back without the worker
  // lock.
  void addRejection(Peer& from, const wire::Header& header, Error why, Admission admission = {}) {
    pending().rejections.push_back({&from, header, std::move(why), std::move(admission)});
  }
  void addJoin(uint64_t session, Bytes record) {
    pending().joins.push_back({session, std::move(record)});
  }
  void addFailure(Peer& peer, Error why) {
    pending().failures.push_back({&peer, std::move(why)});
  }
  // Notes that the endpoint to a peer has failed, and that another one will be made. Unlike a failure it says nothing
  // about the peer.
  void addBreak(Peer& peer) {
    pending().breaks.push_back(&peer);
  }
  // Adds work that may block, and so must not be done under the worker lock. An agent thread does it, or a waiting
  // caller that has nothing else to do. A leader must not do it, since nothing arrives until the leader is back. Other
  // threads must not do it, since they may hold torch's locks.
  void addWork(UniqueFunction<void()> work) {
    pending().work.push_back(std::move(work));
  }

  bool hasWork() const {
    return pending_ != nullptr && !pending_->work.empty();
  }
  bool isEmpty() const {
    return pending_ == nullptr;
  }
  // Takes all events so far. Null if there are none.
  std::unique_ptr<EventBatch> take();

 private:
  struct Control {
    Peer* from;
    ControlFrame frame;
  };
  struct CutAnswer {
    Peer* to;
    uint64_t callId;
    Error why;
  };
  struct Rejection {
    Peer* from;
    wire::Header header;
    Error why;
    Admission admission;
  };
  struct Join {
    uint64_t session;
    Bytes record;
  };
  struct Failure {
    Peer* peer;
    Error why;
  };
  class Batch final : public EventBatch {
   public:
    explicit Batch(EventBuffer& buffer) : buffer_(buffer) {}
    void dispatch(const std::optional<Driver>& driver) override;

    std::vector<IncomingMessage> answers;
    std::vector<IncomingMessage> puts;
    std::vector<std::unique_ptr<OutgoingMessage>> sent;
    std::vector<CutAnswer> cutAnswers;
    std::vector<Rejection> rejections;
    std::vector<Join> joins;
    std::vector<std::variant<IncomingMessage, Control>> inOrder; // requests and control frames
    std::vector<Failure> failures;
    std::vector<Peer*> breaks;
    std::vector<UniqueFunction<void()>> work;
    DispatchOrder::Turn turn;

   private:
    void dispatchWork(bool mayDoLast);
    void dispatchSent(OutgoingMessage& message);
    void dispatchRejection(Rejection& rejection);

    EventBuffer& buffer_;
  };

  Batch& pending() {
    if (pending_ == nullptr) {
      pending_ = std::make_unique<Batch>(*this);
    }
    return *pending_;
  }

  const EventHandlers& handlers_;
  SentMessages& sentMessages_;
  Executor& executor_;
  const Lifetime& lifetime_;
  DispatchOrder order_;
  std::unique_ptr<Batch> pending_; // guarded by the worker lock
};

} // namespace torch_ucx_rpc
