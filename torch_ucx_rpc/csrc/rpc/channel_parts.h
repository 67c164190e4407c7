#pragma once

// The parts of a Channel, for its own sources.

#include "rpc/channel.h"

#include <ATen/core/Tensor.h>

namespace torch_ucx_rpc {

// The bytes that a value costs its receiver beside its small tensors.
inline constexpr uint64_t kOverheadOfValue = 512;

// Tensors that were posted, after the transport is done with them. They must not be destroyed under the worker lock,
// since that may run Python.
class Channel::Grave {
 public:
  void add(at::Tensor tensor) {
    const std::lock_guard lock(mutex_);
    tensors_.push_back(std::move(tensor));
    isEmpty_.store(false);
  }
  void empty() {
    if (isEmpty_.load()) {
      return;
    }
    std::vector<at::Tensor> dead;
    const std::lock_guard lock(mutex_);
    dead.swap(tensors_);
    isEmpty_.store(true);
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> tensors_; // guarded by mutex_
  std::atomic<bool> isEmpty_{true};
};

class Channel::Sent {
 public:
  explicit Sent(Peer& to, uint64_t lentBytes) : to(to), lentBytes(lentBytes) {}

  Peer& to;
  const uint64_t lentBytes;
  Error error; // constant once isDone
  std::atomic<bool> isDone{false};
};

class Channel::Expected {
 public:
  Expected(Peer& from, Name name, std::optional<std::vector<at::Tensor>> into)
      : from(from), name(std::move(name)), into(std::move(into)) {}

  Peer& from;
  const Name name;
  const std::optional<std::vector<at::Tensor>> into;
  std::atomic<bool> isTaken{false}; // wait() has returned the value, or refused it
  // Guarded by the channel's mutex until isDone:
  bool isExpected = false; // in a slot, or matched
  bool isMatched = false; // a value is being received for it
  IncomingMessage message;
  bool isInOthersMemory = false; // the message is in tensors that were posted for another wait
  std::optional<RpcFailure> failure;
  std::atomic<bool> isDone{false};
};

// A value in its slot, or on its way to the wait for it.
struct Channel::Arrival {
  enum class State : uint8_t {
    kHeld, // its spans wait at the sender
    kReceiving, // until onPut() or onPutRejected()
    kHere,
    kDropped, // while it was being received
  };

  Arrival(Peer& from, uint64_t number, const wire::PutName& name, uint64_t bodyBytes, State state)
      : from(from),
        number(number),
        name{std::string(name.group), name.epoch, std::string(name.tag)},
        bodyBytes(bodyBytes),
        state(state) {}

  Peer& from;
  const uint64_t number;
  const Name name;
  const uint64_t bodyBytes;
  // Guarded by the channel's mutex:
  State state;
  Bytes body; // while the value is held: memoryIn() needs it
  std::vector<uint64_t> spanBytes; // likewise
  uint64_t untakenBytes = 0; // its part of Channel::untakenBytes_, which does not count values that are held
  bool isInOthersMemory = false; // in tensors that were posted
  IncomingMessage message; // once it is here
  ExpectedPtr expected; // the wait for which the value is being received; null: none
  std::optional<RpcFailure> failure; // ends `expected` when the value is dropped
};

struct Channel::Aftermath {
  std::vector<std::pair<Peer*, ControlFrame>> frames;
  struct Receive {
    Peer* from;
    uint64_t number;
    std::vector<c10::DataPtr> into;
  };
  std::vector<Receive> receives;
  std::vector<std::pair<Peer*, uint64_t>> drops;
  std::vector<ArrivalPtr> dead;
  bool mustWake = false;
};

} // namespace torch_ucx_rpc
