#pragma once

#include "memory/devices_in_use.h"
#include "messaging/connection.h"
#include "messaging/control_frames.h"
#include "messaging/device_watch.h"
#include "messaging/event_buffer.h"
#include "messaging/event_handlers.h"
#include "messaging/inbox.h"
#include "messaging/outbox.h"
#include "messaging/push_share.h"
#include "messaging/receive_window.h"
#include "messaging/retries.h"
#include "messaging/sent_messages.h"
#include "messaging/shared_memory_repair.h"
#include "peers/directory.h"
#include "peers/peer.h"
#include "runtime/executor.h"
#include "runtime/lifetime.h"
#include "runtime/progress.h"
#include "runtime/timer.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Sends and receives messages. It owns the transport and every object that touches it, such as Progress, Outbox and
// Inbox. The rest of the agent calls post(), and learns through the EventHandlers what has arrived, left or failed.
//
// Thread-safe, except methods whose names end in WithWorkerLock. Those are for operations that the messenger itself
// runs under the lock.
class Messenger final : public Leader, public PeerObserver, private ProgressClient {
 public:
  struct Options {
    uint64_t receiveWindowBytes = 0;
    Waiting waiting = Waiting::kAuto;
  };
  // Copies a message to the worker itself into the memory of `arrived`. The messenger does not know how devices copy.
  using CopyForSelf = Error (*)(OutgoingMessage& message, IncomingMessage& arrived);

  // Adds tasks to the timer, so the timer must not have started. The messenger uses the handlers only once members have
  // been added.
  Messenger(
      std::unique_ptr<Transport> transport,
      Identity self,
      const Directory& directory,
      const DevicesInUse& devices,
      const EventHandlers& handlers,
      Executor& executor,
      Timer& timer,
      const Lifetime& lifetime,
      CopyForSelf copyForSelf,
      const Options& options);

  // Sends a message: addresses it, seals it, and queues it for the transport. A message to this worker itself arrives
  // at once, as a copy.
  void post(Peer& to, wire::Kind kind, uint64_t callId, std::unique_ptr<OutgoingMessage> message);
  // Sends a control frame in the same way.
  void postControl(Peer& to, ControlFrame frame);
  // Sends a control frame without a body, ahead of queued operations.
  void sendNowWithWorkerLock(Peer& to, wire::Kind kind) {
    outbox_.sendControl(to, kind);
  }

  // Gives up calls whose callers no longer wait. Requests that have not left never leave. The callees of the others get
  // a cancellation, and the parts of their answers that have come are dropped.
  void cancel(std::vector<std::pair<Peer*, uint64_t>> calls);

  // Receive or drop a value that PutHandler::onPutAnnounced() has held back.
  void receivePut(Peer& from, uint64_t number, std::vector<c10::DataPtr> into);
  void dropPut(Peer& from, uint64_t number);

  // Sends the messages that have waited until the peer admitted this worker to its group.
  void onAdmitted(Peer& peer);
  // PeerObserver: ends all messages from and to the peer.
  void onPeerGone(Peer& peer) override;
  // Adds the failure of a peer, like one that the transport reports. The handler gets it after everything that has
  // arrived.
  void addFailureWithWorkerLock(Peer& peer, Error why) {
    events_.addFailure(peer, std::move(why));
  }

  // From now on, processes that are not members may ask to become one. If `joinKey` is not empty, their frames must be
  // sealed with it.
  void acceptJoins(const std::string& joinKey);

  // Checks the content of a message that came by rendezvous. Content that its sender did not seal is an error, and
  // counts as a refused frame.
  Error checkContent(const IncomingMessage& message);

  bool lead() override; // the executor's threads call it
  // Destroys sent messages that wait for a thread that runs anyway, and holds none of torch's locks.
  void destroySent() {
    sentMessages_.destroyWaiting();
  }
  // For operations under the worker lock, for threads that drive while they wait, and to wake those threads.
  Progress& progress() {
    return progress_;
  }
  // Sets how many workers the group has, and how many of them this machine has. This one counts in both.
  void setGroupSize(size_t workers, size_t workersHere) {
    share_.setWorkers(workers);
    progress_.setProcessesHere(workersHere);
  }

  // Takes in everything that has arrived, including messages that no thread has looked at yet.
  void drainTransportWithWorkerLock();
  // Asks for a repair of shared memory. A dead process of this machine may have left a gap there, which blocks messages
  // to this worker (see Transport::repairState()).
  void requestRepair() {
    repair_.request();
  }

  // Closes the transport. Messages that were sent last have up to `flushLimitMs` to leave. The handlers still
  // get the events that closing causes.
  void close(int64_t flushLimitMs);

  // For reports.
  const std::string& address() const {
    return transport_->address();
  }
  const Transport& transport() const {
    return *transport_;
  }
  // The transport that carries messages to `to`. Null for this worker itself, which gets a copy of each message.
  const Transport* transportTo(const Peer& to) const {
    return to.member().session != self_.session ? transport_.get() : nullptr;
  }
  const ReceiveWindow& window() const {
    return inbox_.window();
  }
  const PushShare& share() const {
    return share_;
  }
  uint64_t refusedFrames() const {
    return inbox_.refusedFrames();
  }
  uint64_t stagedBytes() const {
    return stagedBytes_.load();
  }
  struct Traffic {
    size_t underWay = 0; // see Outbox::underWay()
    std::vector<std::vector<std::string>> lanes; // of each peer, empty before the first message
  };
  // Waits for the worker lock.
  Traffic traffic(const std::vector<const Peer*>& peers = {});

 private:
  // ProgressClient.
  void startDeferredWithWorkerLock() override;
  bool usesDevices() const override {
    return devices_.isOn();
  }
  bool waitsForDeviceWithWorkerLock() const override {
    return connections_.waitsForDevice();
  }
  bool hasEventsWithWorkerLock() const override {
    return !events_.isEmpty();
  }
  bool mayEventsBlockWithWorkerLock() const override {
    return events_.hasWork();
  }
  std::unique_ptr<EventBatch> takeEventsWithWorkerLock() override {
    return events_.take();
  }

  // A message to oneself skips the transport, because UCX's own loopback has no wake-up. Like any receiver, this worker
  // gets a copy.
  void deliverToSelf(std::unique_ptr<OutgoingMessage> message);
  void countStaged(const OutgoingMessage& message);
  // Timer task: admits messages whose wait for the receive window would never end.
  Timer::TimePoint checkWindow(Timer::TimePoint now);
  // Timer task: acknowledges frames if no frame to their sender has done so.
  Timer::TimePoint acknowledge(Timer::TimePoint now);

  // Constant after construction.
  const Identity self_;
  const EventHandlers& handlers_;
  const Executor& executor_;
  const Lifetime& lifetime_;
  const CopyForSelf copyForSelf_;
  Timer::Task& windowTask_;
  Timer::Task& acknowledgeTask_;

  // In order of construction: each member uses those above it.
  const std::unique_ptr<Transport> transport_; // worker lock
  SentMessages sentMessages_; // own synchronization
  EventBuffer events_; // worker lock
  Progress progress_; // own synchronization: it has the worker lock
  PushShare share_; // own synchronization
  Connections connections_; // worker lock
  Outbox outbox_; // worker lock
  Inbox inbox_; // worker lock
  const MessengerParts parts_;
  DeviceWatch devices_; // own synchronization
  SharedMemoryRepair repair_; // own synchronization
  Retries retries_; // worker lock

  std::atomic<uint64_t> stagedBytes_{0};
};

} // namespace torch_ucx_rpc
