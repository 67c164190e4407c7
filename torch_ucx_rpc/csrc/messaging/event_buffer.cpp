#include "messaging/event_buffer.h"

#include <algorithm>

namespace torch_ucx_rpc {

std::unique_ptr<EventBatch> EventBuffer::take() {
  if (pending_ != nullptr) {
    pending_->turn = order_.begin(); // under the worker lock, so the turns are in the order of the batches
  }
  return std::move(pending_);
}

void EventBuffer::Batch::dispatch(const std::optional<Driver>& driver) {
  WorkAtEnd atEnd;
  for (IncomingMessage& answer : answers) {
    buffer_.handlers_.answers->onAnswer(std::move(answer), driver, atEnd);
  }
  for (IncomingMessage& value : puts) {
    buffer_.handlers_.puts->onPut(std::move(value), driver);
  }
  for (std::unique_ptr<OutgoingMessage>& message : sent) {
    dispatchSent(*message);
    // A waiting caller does not hold torch's locks. So the messages end with the batch, after everything else in it.
    if (!driver) {
      buffer_.sentMessages_.destroyLater(message);
    } else if (driver->role != Role::kWaitingCaller) {
      buffer_.sentMessages_.destroy(message);
    }
  }
  for (const CutAnswer& answer : cutAnswers) {
    buffer_.handlers_.requests->onAnswerNotSent(*answer.to, answer.callId, answer.why, true);
  }
  for (Rejection& rejection : rejections) {
    dispatchRejection(rejection);
  }
  for (Join& join : joins) {
    buffer_.handlers_.group->onJoin(join.session, std::move(join.record));
  }
  // A driver runs short requests itself. A thread that is woken for a short request would compete with the driver for
  // the processor. A waiting caller may be inside a task, in torch's handling of a request. torch does not expect
  // another request on that thread.
  std::vector<IncomingMessage> onDriver;
  if (driver && !Executor::isInTask()) {
    std::erase_if(inOrder, [&](std::variant<IncomingMessage, Control>& event) {
      auto* request = std::get_if<IncomingMessage>(&event);
      const bool isTaken = request != nullptr && buffer_.handlers_.requests->mayRunOnDriver(*request);
      if (isTaken) {
        onDriver.push_back(std::move(*request));
      }
      return isTaken;
    });
  }
  for (Peer* peer : breaks) {
    buffer_.handlers_.peers->onBroken(*peer);
  }
  // A request may wait for the effect of an earlier one. If later requests took all threads first, the earlier one
  // would get none.
  if (!inOrder.empty() || !failures.empty()) {
    turn.end([handlers = &buffer_.handlers_, inOrder = std::move(inOrder), failures = std::move(failures)]() mutable {
      for (std::variant<IncomingMessage, Control>& event : inOrder) {
        if (auto* request = std::get_if<IncomingMessage>(&event)) {
          handlers->requests->onRequest(std::move(*request));
        } else {
          const auto& [from, frame] = std::get<Control>(event);
          dispatchControl(*handlers, *from, frame);
        }
      }
      for (Failure& failure : failures) {
        handlers->peers->onFailure(*failure.peer, std::move(failure.why));
      }
    });
  }
  turn.end(); // batches after this one must not wait for the user code below
  // A waiting caller that blocks in the last work delays no other thread. Because of mayEventsBlockWithWorkerLock(),
  // Progress has left the guard to another driver, if one sleeps.
  dispatchWork(driver && driver->role == Role::kWaitingCaller && onDriver.empty() && atEnd.empty());
  for (IncomingMessage& request : onDriver) {
    buffer_.handlers_.requests->runOnDriver(std::move(request));
  }
  for (UniqueFunction<void()>& work : atEnd) {
    work();
  }
  if (driver && driver->role == Role::kWaitingCaller) {
    buffer_.sentMessages_.destroyWaiting();
  }
}

void EventBuffer::Batch::dispatchWork(bool mayDoLast) {
  for (UniqueFunction<void()>& task : work) {
    const bool isLast = &task == &work.back();
    std::shared_ptr<void> hold = mayDoLast && isLast ? nullptr : buffer_.lifetime_.hold();
    if (hold == nullptr) { // also if the agent is being destroyed: no other thread will do the task
      task();
    } else {
      buffer_.executor_.addCompletion([hold = std::move(hold), task = std::move(task)]() mutable { task(); });
    }
  }
}

void EventBuffer::Batch::dispatchSent(OutgoingMessage& message) {
  if (message.header.kind == wire::Kind::kPut) {
    buffer_.handlers_.puts->onPutSent(*message.to, message.header.callId, message.error);
    return;
  }
  if (!message.error) {
    return;
  }
  switch (message.header.kind) {
    case wire::Kind::kRequest:
      buffer_.handlers_.answers->onRequestNotSent(*message.to, message.header.callId, message.error);
      return;
    case wire::Kind::kResponse:
      if (!message.hasLeftInPart) { // otherwise addCutAnswer() has reported it
        buffer_.handlers_.requests->onAnswerNotSent(*message.to, message.header.callId, message.error, false);
      }
      return;
    default:
      buffer_.handlers_.peers->onControlNotSent(*message.to, message.error);
  }
}

void EventBuffer::Batch::dispatchRejection(Rejection& rejection) {
  if (rejection.header.kind == wire::Kind::kRequest) {
    buffer_.handlers_.requests->onRequestRejected(*rejection.from, rejection.header.callId, rejection.why);
  } else if (rejection.header.kind == wire::Kind::kPut) {
    buffer_.handlers_.puts->onPutRejected(*rejection.from, rejection.header.callId, rejection.why);
  } else {
    buffer_.handlers_.answers->onAnswerRejected(*rejection.from, rejection.header.callId, rejection.why);
  }
}

} // namespace torch_ucx_rpc
