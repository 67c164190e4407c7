#pragma once

#include "messaging/message.h"
#include "wire/replay_window.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace torch_ucx_rpc {

// Messages to one peer that have been given to the transport, and that the peer may not have yet. They are kept so that
// they can be sent again over another endpoint (docs/development/resumption.md). It also numbers the frames to the
// peer. The worker lock guards it.
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

  // In the order of their numbers.
  const Messages& all() const {
    return messages_;
  }
  uint64_t bytes() const {
    return bytes_;
  }

  // The peer has all frames below a number, of which this is the low half. Ignores what cannot be.
  void onAcknowledged(uint32_t low);
  // The peer has these frames. Ignores what cannot be.
  void onReceived(const wire::ReplayWindow& received);

  // An operation of a message has ended late, or it has failed: takeEnded() looks at all messages.
  void lookAtAll() {
    mustLookAtAll_ = true;
  }
  // Whether takeEnded() would find something.
  bool hasEnded() const {
    return mustLookAtAll_ || (!messages_.empty() && isEnded(*messages_.front()));
  }
  // Takes the messages that the transport has done with, and that the peer has, or that have failed. With `isOver` all
  // that the transport has done with: the peer will hear of none any more.
  std::vector<std::unique_ptr<OutgoingMessage>> takeEnded(bool isOver);

  // A message has failed for good. Pongs take the place of its frames that the peer does not have, since the peer waits
  // for every number. Returns them; they are kept.
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
