#pragma once

#include "messaging/message.h"
#include "wire/replay_window.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace torch_ucx_rpc {

// Keeps numbered messages to one peer until the peer has them, so that Outbox can send them again over another endpoint
// (docs/development/connection.md). KeptMessages also numbers the frames to the peer. The worker lock guards it.
class KeptMessages {
 public:
  using Messages = std::deque<std::unique_ptr<OutgoingMessage>>;

  // Gives each frame of the message its number, in the order in which they leave: the pieces, then the body.
  void number(OutgoingMessage& message);

  // Keeps a message with numbers.
  void add(std::unique_ptr<OutgoingMessage> message);

  // The number of the next frame.
  uint64_t nextNumber() const {
    return nextNumber_;
  }

  // The messages in the order of their numbers.
  const Messages& all() const {
    return messages_;
  }
  uint64_t bytes() const {
    return bytes_;
  }

  // Notes that the peer has all frames below a number, of which `low` is the low half. Ignores an impossible number.
  void onAcknowledged(uint32_t low);
  // Notes that the peer has these frames. Ignores impossible ones.
  void onReceived(const wire::ReplayWindow& received);

  // Call it when an operation of a message has ended late, or a message has failed. takeEnded() then looks at all
  // messages.
  void lookAtAll() {
    mustLookAtAll_ = true;
  }
  // Whether takeEnded() may find something.
  bool hasEnded() const {
    return mustLookAtAll_ || (!messages_.empty() && isEnded(*messages_.front()));
  }
  // Takes the messages that the transport is done with, if the peer has them or they have failed. With `isOver`, takes
  // all messages that the transport is done with, since none will reach the peer any more.
  std::vector<std::unique_ptr<OutgoingMessage>> takeEnded(bool isOver);

  // Puts pongs in the place of those frames of a failed message that the peer does not have. The peer waits for every
  // number. KeptMessages keeps the pongs, and returns them.
  std::vector<OutgoingMessage*> replace(OutgoingMessage& failed);

 private:
  static bool isEnded(const OutgoingMessage& message) {
    return message.unfinished == 0 && (message.error || message.hasArrived());
  }

  Messages messages_;
  uint64_t bytes_ = 0;
  uint64_t nextNumber_ = 1;
  uint64_t acknowledged_ = 1; // the peer has all below
  bool mustLookAtAll_ = false;
};

} // namespace torch_ucx_rpc
