#pragma once

#include "messaging/eager_credit.h"
#include "peers/peer.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ucx_rpc {

using torch::distributed::rpc::JitFuture;

// The calls that wait for an answer. Only one thread can take a call out. That thread completes the call's future, with
// the answer, or because of the deadline, the peer's failure or shutdown. Or it puts the call back with reopen().
// (JitFuture itself has no test-and-set.) Thread-safe.
class CallTable {
 public:
  using Clock = std::chrono::steady_clock;

  struct Call {
    c10::intrusive_ptr<JitFuture> future;
    Peer* to = nullptr;
    torch::distributed::rpc::MessageType type = torch::distributed::rpc::MessageType::UNKNOWN;
    Clock::time_point sentAt{};
    std::chrono::milliseconds timeout{0}; // 0: none
    bool mustRun = false; // even if its time is up: see mustExecute()
    bool makesRRef = false;
    // If set, the reason why the call has not made its RRef. The owner gets this reason, and the call ends when the
    // owner has answered.
    std::optional<std::string> failure;
    Clock::time_point deadline = Clock::time_point::max();
    std::shared_ptr<void> nesting; // Executor::markBlocked(): released with the call
    EagerCredit eager; // given back with the call

    // When its time is up. The table lets it expire at `deadline`, which may be earlier.
    Clock::time_point end() const {
      return timeout.count() != 0 ? sentAt + timeout : Clock::time_point::max();
    }
  };

  // Adds a call under a new id. Sets `isEarliest` if no other open call has an earlier deadline.
  uint64_t open(Call call, bool& isEarliest);

  // Takes out a call to `peer`. Nothing if the call is not open, or is to another peer.
  std::optional<Call> take(uint64_t id, const Peer& peer);

  // Takes out all calls, or all those to a peer.
  std::vector<Call> takeAll(const Peer* to = nullptr);

  // Takes out the calls whose deadline has come. `next` gets the next deadline.
  struct Expired {
    uint64_t id;
    Call call;
  };
  std::vector<Expired> takeExpired(Clock::time_point now, Clock::time_point& next);
  // Puts an expired call back. It expires again at `deadline`.
  void reopen(Expired expired, Clock::time_point deadline);

  // Whether the answer of `peer` to this call is awaited.
  bool isOpen(uint64_t id, const Peer& peer) const;
  size_t size() const;
  // The number of calls opened since the beginning.
  uint64_t opened() const;

 private:
  struct Entry {
    Call call;
    std::multimap<Clock::time_point, uint64_t>::iterator deadline; // end() for none
  };
  using Entries = std::unordered_map<uint64_t, Entry>;
  // Erases the entry and returns its call.
  Call removeLocked(Entries::iterator entry);

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  Entries entries_;
  std::multimap<Clock::time_point, uint64_t> deadlines_;
  uint64_t nextId_ = 0;
};

} // namespace torch_ucx_rpc
