#pragma once

#include "base/bytes.h"
#include "transport/transport.h"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

class LoopbackTransport;

// An in-process network for tests: transports reach each other by name, with faults on demand. The network is
// thread-safe. Like any transport, each of its transports belongs to one thread. The network must outlive them.
class LoopbackNetwork {
 public:
  enum class Fate { kDeliver, kDrop, kDuplicate, kHold, kFail };

  // Decides the fate of every message, on the sending thread, with the network locked. Without it, everything is
  // delivered.
  // - kDrop: the message vanishes, and the sender takes it for sent; a rendezvous stays pending for ever.
  // - kHold: it waits for releaseHeld().
  // - kFail: the send completes with an error.
  using Fault = std::function<Fate(const wire::Header& header, SendMode mode)>;

  // The name is the transport's address.
  std::unique_ptr<Transport> makeTransport(const std::string& name);

  void setFault(Fault fault);

  // Sets the result of canShare() of all transports; true by default.
  void shareDeviceMemory(bool isShared) {
    isDeviceMemoryShared_.store(isShared);
  }

  // Sets deviceMemoryRefusal() of all transports. Call it before making any.
  void refuseDeviceMemory(Error why) {
    deviceMemoryRefusal_ = std::move(why);
  }

  // Returns how many rendezvous so far were in device memory on only one side. Real transports copy these in small
  // pieces.
  uint64_t mixedRendezvous() const {
    return mixedRendezvous_.load();
  }

  // Delivers the held messages, the latest first, to test reordering.
  void releaseHeld();

  // Behaves as if the connection from `from` to `to` were reset: messages in flight on it are lost, except held ones,
  // and the endpoints of `from` fail. `from` may make others.
  void reset(const std::string& from, const std::string& to);

  // Receives that begin from now on stall. They end, with an error, when their worker abandons its endpoint to the
  // sender.
  void stallReceives(bool areStalled) {
    areReceivesStalled_.store(areStalled);
  }
  // From now on stalled receives also end when their worker closes their origin, an endpoint that the worker has not
  // made.
  void makeOriginsInternal() {
    areOriginsInternal_.store(true);
  }

  // From now on the shared memory of all transports is beyond repair.
  void makeDeaf() {
    isDeaf_.store(true);
  }

  // Behaves as if the process behind `name` had died: every endpoint to it fails, and nothing more comes from it.
  void kill(const std::string& name);

 private:
  friend class LoopbackTransport;

  // Bytes that wait at the sender. Guarded by the network's mutex.
  struct Rendezvous {
    LoopbackTransport* sender;
    uint64_t operation;
    std::span<const std::byte> bytes;
    Memory memory = Memory::kHost; // the place of the bytes
    EndpointId endpoint = 0;
    bool isCompleted = false; // the sender's operation has completed, so the bytes must not be read
  };
  struct Delivery {
    wire::Header header;
    Bytes eager;
    std::shared_ptr<Rendezvous> rendezvous;
    std::string from;
    std::string to;
  };

  void deliverLocked(Delivery delivery);

  std::atomic<bool> isDeviceMemoryShared_{true};
  std::atomic<uint64_t> mixedRendezvous_{0};
  std::atomic<bool> areReceivesStalled_{false};
  std::atomic<bool> areOriginsInternal_{false};
  std::atomic<bool> isDeaf_{false};
  Error deviceMemoryRefusal_; // constant once there are transports

  std::mutex mutex_;
  // Guarded by mutex_:
  std::map<std::string, LoopbackTransport*> transports_;
  Fault fault_;
  std::vector<Delivery> held_;
};

} // namespace torch_ucx_rpc
