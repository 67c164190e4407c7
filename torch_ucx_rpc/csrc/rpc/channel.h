#pragma once

#include "messaging/event_handlers.h"
#include "peers/peer.h"
#include "rpc/agent_parts.h"
#include "rpc/device_maps.h"
#include "wire/put.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// One-way tensors: a worker puts a value under a tag of another worker, where it waits to be taken. No function runs
// for the value. No thread is woken unless one waits for this value. A thread that waits for a value also drives
// progress.
//
// A value is identified by (group, epoch, sender, tag). Each group is in one epoch, and epochs count up. Values of an
// earlier epoch are dropped, and their senders learn that. Values of a later epoch wait.
//
// Bounds on values that are not taken. One value alone may exceed any of them:
// - Small tensors travel in the body of the put. A sender may have kOpenBodyBytes of untaken bodies at a receiver, and
//   put() blocks beyond that. A receiver reports after each quarter of kOpenBodyBytes that it has taken.
// - Large tensors wait at their sender. They are received when the value is expected, or while all values that are here
//   but not expected stay within kUntakenBytes. A sender lends at most kLentBytes to a receiver, and put() blocks
//   beyond that.
//
// A large tensor is received straight into the tensor that was posted for it, if both have the same layout and the
// posted one is contiguous and on the CPU. Thread-safe.
class Channel final : public PutHandler, public PeerObserver, private AgentParts {
 public:
  static constexpr uint64_t kOpenBodyBytes = 8ull * 1024 * 1024;
  static constexpr uint64_t kLentBytes = 256ull * 1024 * 1024;
  static constexpr uint64_t kUntakenBytes = 64ull * 1024 * 1024;

  struct Name {
    std::string group;
    uint64_t epoch = 0;
    std::string tag;
  };
  struct Value {
    std::vector<at::Tensor> tensors;
    bool isSingle = false; // a tensor, not a list of one
  };

  class Sent; // a value that its sender has put
  class Expected; // a value that its receiver waits for

  // Threads that wait call `whileWaiting` now and then. It may throw to end the wait (Ctrl-C).
  Channel(const AgentParts& parts, const DeviceMaps& deviceMaps, std::function<void()> whileWaiting);
  ~Channel() override;

  // Goes to an epoch: drops values of earlier ones, and ends waits for them with kEpochEnded. Throws
  // std::invalid_argument if the group is in a later epoch.
  void advance(const std::string& group, uint64_t epoch);
  // Drops the values of earlier epochs of all groups whose names begin with `prefix`, and ends waits for them. Such
  // values are also dropped when they come later, even for groups that this worker opens later, or never.
  void advanceAll(const std::string& prefix, uint64_t epoch);
  // Forgets a group and its values. Waits for its values end with kEpochEnded.
  void close(const std::string& group);

  // A `timeout` of 0 means none. Throws RpcFailure, and c10::Error for tensors that cannot be sent.
  std::shared_ptr<Sent> put(Peer& to, const Name& name, const Value& value, std::chrono::milliseconds timeout);
  // Returns when the memory of the value may be changed.
  void wait(const std::shared_ptr<Sent>& sent);

  // Says that a value is expected. With `into`, the value goes into these tensors. The caller must not read or change
  // them before wait() has returned.
  std::shared_ptr<Expected> post(Peer& from, const Name& name, std::optional<std::vector<at::Tensor>> into);
  // Waits for the value and returns it, once; later calls throw std::runtime_error. Throws RpcFailure. A value that has
  // not come by `timeout` (0: none) is not expected until the next call. Throws std::invalid_argument if the value does
  // not fit the posted tensors.
  Value wait(const std::shared_ptr<Expected>& expected, std::chrono::milliseconds timeout);
  // Stops expecting the value. If it has begun to arrive in tensors that were posted, they may still be written.
  void cancel(const std::shared_ptr<Expected>& expected);

  // Ends all waits.
  void shutDown();

  struct Counts {
    uint64_t put = 0;
    uint64_t taken = 0;
    uint64_t untakenBytes = 0; // of values that are here
  };
  Counts counts() const;

  // PutHandler.
  Verdict onPutAnnounced(
      Peer& from,
      const wire::Header& header,
      std::span<const std::byte> body,
      std::span<const uint64_t> spanBytes) override;
  void onPut(IncomingMessage value, const std::optional<Driver>& driver) override;
  void onPutRejected(Peer& from, uint64_t number, const Error& why) override;
  void onPutSent(Peer& to, uint64_t number, const Error& error) override;
  void onTaken(Peer& from, uint64_t bytes) override;
  void onPutRefused(Peer& by, const std::string& group, uint64_t epoch) override;

  // PeerObserver.
  void onPeerGone(Peer& peer) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Arrival;
  class Grave;
  using ArrivalPtr = std::shared_ptr<Arrival>;
  using ExpectedPtr = std::shared_ptr<Expected>;
  using Number = std::pair<const Peer*, uint64_t>; // of a put that has come: its sender, and the sender's number

  // The values of one tag, or the waits for such values: one of the two is empty.
  struct Slot {
    std::deque<ArrivalPtr> arrivals;
    std::deque<ExpectedPtr> expected;
  };
  struct Group {
    bool isOpen = false; // advance() has been called
    uint64_t epoch = 0;
    std::map<uint64_t, std::unordered_map<std::string, Slot>> slots; // by epoch, then by sender and tag
  };
  // This worker's open values at a peer, and what it still has to report to the peer.
  struct Account {
    std::atomic<uint64_t> openBodyBytes{0}; // bodies of this worker's puts that the peer has not taken
    std::atomic<uint64_t> lentBytes{0}; // tensors of puts that have not left
    // Guarded by mutex_:
    uint64_t owedBytes = 0; // bodies of the peer's puts that were taken here and not yet reported
    std::unordered_map<std::string, uint64_t> refused; // the peer's epochs in groups where it has dropped puts
  };
  // What remains to be done without the lock: operations of the messenger, and destroying messages and tensors.
  struct Aftermath;

  // Waits until isDone(), which must take no lock. False after the deadline.
  template <typename IsDone>
  bool waitUntil(const IsDone& isDone, Clock::time_point deadline);
  static Clock::time_point deadlineOf(std::chrono::milliseconds timeout);
  void wakeWaiting(const std::optional<Driver>& driver);
  // Throws after the shutdown, and if the group is closed on this worker, or in a later epoch.
  void checkEpochLocked(const Name& name) const;
  RpcFailure shutDownFailure() const;
  RpcFailure epochEnded(const std::string& who, const std::string& group, std::optional<uint64_t> epoch) const;

  // Returns the earliest epoch that the group can be in, if that is later than the value's.
  std::optional<uint64_t> laterEpochLocked(const wire::PutName& name) const;
  // Returns the slot of a value. Makes the slot if the value has no slot yet.
  Slot& slotLocked(const Peer& from, const Name& name);
  void forgetIfEmptyLocked(const Peer& from, const Name& name);
  // Takes the first wait for this value out of its slot. Null if there is none.
  ExpectedPtr takeExpectedLocked(const Peer& from, const wire::PutName& name);
  // Puts the wait into its slot, or gives it a value, unless it has been there since its last cancel().
  void expect(const ExpectedPtr& expected);
  // Gives a value to the wait for it.
  void matchLocked(const ArrivalPtr& arrival, const ExpectedPtr& expected, Aftermath& after);
  // Notes that a body was taken or dropped.
  void addOwedLocked(Peer& from, uint64_t bodyBytes, Aftermath& after);
  // Gives memory back to the bound on values that are not expected, and receives values that were held.
  void freeUntakenLocked(uint64_t bytes, Aftermath& after);
  void dropLocked(const ArrivalPtr& arrival, Aftermath& after);
  void failLocked(const ExpectedPtr& expected, const RpcFailure& why);
  void endEpochsLocked(const std::string& name, Group& group, uint64_t before, const RpcFailure& why, Aftermath& after);
  // Returns the memory of posted tensors for the spans that fit them, by the spans' index. Empty if no span fits.
  std::vector<c10::DataPtr> memoryIn(
      const Expected& expected, std::span<const std::byte> body, std::span<const uint64_t> spanBytes) const;
  void carryOut(Aftermath& after);

  // Makes the message of a value. Its body is small enough to go eagerly.
  std::unique_ptr<OutgoingMessage> encode(const Peer& to, const Name& name, const Value& value) const;
  // Makes the value of a message. Large tensors that fit the posted ones lie in them already.
  Value decode(Expected& expected);

  const DeviceMaps& deviceMaps_;
  const std::function<void()> whileWaiting_;
  const std::shared_ptr<Grave> grave_; // own synchronization
  std::atomic<uint64_t> lastNumber_{0};
  std::atomic<uint64_t> taken_{0};

  mutable std::mutex mutex_; // taken under the worker lock too, so no thread asks for that lock while it holds this one
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::unordered_map<std::string, Group> groups_;
  std::map<std::string, uint64_t> floors_; // earliest epochs, by the beginnings of groups' names
  std::unordered_map<const Peer*, Account> accounts_;
  std::map<Number, ArrivalPtr> underWay_; // values that are held or being received
  std::list<ArrivalPtr> held_; // in the order of their arrival
  std::unordered_map<uint64_t, std::shared_ptr<Sent>> sending_; // by number
  uint64_t untakenBytes_ = 0;
};

} // namespace torch_ucx_rpc
