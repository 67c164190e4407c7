#include "messaging/kept_messages.h"

#include <algorithm>
#include <utility>

namespace torch_ucx_rpc {

void KeptMessages::number(OutgoingMessage& message) {
  for (OutgoingMessage::Piece& piece : message.pieces) {
    piece.header.sequence = nextNumber_++;
  }
  message.header.sequence = nextNumber_++;
}

void KeptMessages::add(std::unique_ptr<OutgoingMessage> message) {
  message->isKept = true;
  bytes_ += message->totalBytes();
  messages_.push_back(std::move(message));
}

void KeptMessages::onAcknowledged(uint32_t low) {
  const auto more = static_cast<int32_t>(low - static_cast<uint32_t>(acknowledged_));
  if (more <= 0 || acknowledged_ + static_cast<uint32_t>(more) > nextNumber_) {
    return; // the number is not new, or is impossible
  }
  acknowledged_ += static_cast<uint32_t>(more);
  for (const std::unique_ptr<OutgoingMessage>& message : messages_) {
    if (message->firstNumber() >= acknowledged_) {
      break;
    }
    message->forEachFrame(
        [&](const wire::Header& header, bool& hasArrived) { hasArrived |= header.sequence < acknowledged_; });
  }
}

void KeptMessages::onReceived(const wire::ReplayWindow& received) {
  if (received.next() > nextNumber_) {
    return;
  }
  for (const std::unique_ptr<OutgoingMessage>& message : messages_) {
    message->forEachFrame(
        [&](const wire::Header& header, bool& hasArrived) { hasArrived |= received.hasCome(header.sequence); });
  }
  mustLookAtAll_ = true;
}

std::vector<std::unique_ptr<OutgoingMessage>> KeptMessages::takeEnded(bool isOver) {
  std::vector<std::unique_ptr<OutgoingMessage>> ended;
  const auto take = [&](std::unique_ptr<OutgoingMessage>& message) {
    const bool isTaken = isOver ? message->unfinished == 0 : isEnded(*message);
    if (isTaken) {
      bytes_ -= message->totalBytes();
      ended.push_back(std::move(message));
    }
    return isTaken;
  };
  if (std::exchange(mustLookAtAll_, false) || isOver) {
    std::erase_if(messages_, take);
  } else {
    while (!messages_.empty() && take(messages_.front())) {
      messages_.pop_front();
    }
  }
  return ended;
}

std::vector<OutgoingMessage*> KeptMessages::replace(OutgoingMessage& failed) {
  std::vector<OutgoingMessage*> pongs;
  auto place = std::ranges::find_if(messages_, [&](const std::unique_ptr<OutgoingMessage>& message) {
    return message->firstNumber() > failed.firstNumber();
  });
  failed.forEachFrame([&](const wire::Header& header, bool hasArrived) {
    if (hasArrived) {
      return;
    }
    auto pong = std::make_unique<OutgoingMessage>();
    pong->to = failed.to;
    pong->address(
        wire::Kind::kPong,
        header.sourceSession,
        static_cast<Rank>(header.sourceRank),
        header.targetSession,
        /*callId=*/0);
    pong->header.sequence = header.sequence;
    pong->isKept = true;
    pongs.push_back(pong.get());
    place = std::next(messages_.insert(place, std::move(pong)));
  });
  return pongs;
}

} // namespace torch_ucx_rpc
