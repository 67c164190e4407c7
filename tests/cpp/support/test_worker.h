#pragma once

// The parts of a worker up to its Messenger, connected as in an agent. The test drives them, and sets the clock. No
// thread drives: the worker takes in frames, and hands out events, when the test says so.

#include "eventually.h"
#include "loopback_transport.h"
#include "memory/devices_in_use.h"
#include "messaging/messenger.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Returns a member of a job. Each looks as if on its own machine, so no process is watched.
inline Member memberOf(Rank rank) {
  Member member;
  member.rank = rank;
  member.name = "w" + std::to_string(rank);
  member.host = "host" + std::to_string(rank);
  member.pid = 1000 + rank;
  member.bootId = "machine " + std::to_string(rank);
  member.session = 100 + static_cast<uint64_t>(rank);
  member.address = "address " + std::to_string(rank);
  return member;
}

inline std::vector<Member> membersOf(Rank size) {
  std::vector<Member> members;
  for (Rank rank = 0; rank < size; ++rank) {
    members.push_back(memberOf(rank));
  }
  return members;
}

// A leader that receives nothing: agent threads run tasks, and none drives.
class QuietLeader final : public Leader {
 public:
  bool lead() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return isOver_; });
    return true;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    isOver_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool isOver_ = false;
};

class TestWorker {
 public:
  TestWorker(
      std::unique_ptr<Transport> transport,
      Rank rank,
      const std::vector<Member>& members,
      const EventHandlers& handlers,
      Messenger::CopyForSelf copyForSelf = [](OutgoingMessage&, IncomingMessage&) { return Error(); },
      uint64_t receiveWindowBytes = 64ull << 20)
      : identity{rank, memberOf(rank).name, memberOf(rank).session},
        messenger(
            std::move(transport),
            identity,
            directory,
            devices,
            handlers,
            *executor,
            timer,
            lifetime,
            copyForSelf,
            Messenger::Options{receiveWindowBytes, Waiting::kSleep}) {
    for (const Member& member : members) {
      directory.add(member);
    }
  }
  // Messages of the worker to itself arrive without their tensors, unless `options` say otherwise.
  template <typename... Options>
  TestWorker(
      LoopbackNetwork& network,
      Rank rank,
      const std::vector<Member>& members,
      const EventHandlers& handlers,
      Options... options)
      : TestWorker(network.makeTransport(memberOf(rank).address), rank, members, handlers, options...) {}
  ~TestWorker() {
    close();
  }
  TestWorker(const TestWorker&) = delete;
  TestWorker& operator=(const TestWorker&) = delete;

  // From now on agent threads run tasks.
  void startThreads() {
    executor->start(leader_);
  }
  // Like startThreads(), and the threads receive like an agent's. For tests whose own threads wait.
  void startDriving() {
    executor->start(messenger);
  }

  // Takes in arrived frames, and hands out the events like a thread that only submitted an operation.
  void takeIn() {
    messenger.progress().submit([this] { messenger.drainTransportWithWorkerLock(); });
  }

  // Takes in arrived frames like a leading agent thread. Call it only if a frame has arrived.
  void lead() {
    EXPECT_TRUE(messenger.lead());
  }

  // Lets time pass, and the timer run its due tasks.
  void advance(Timer::Clock::duration time) {
    now.store(now.load() + time);
    (void)timer.runDue(now.load());
  }

  Peer& peer(Rank rank) const {
    return directory.at(rank);
  }

  // Acts like an agent that is being destroyed: lifetime.hold() returns null from now on, so nothing may be queued.
  void endLifetime() {
    alive_.reset();
  }
  // Returns the number of holders of the agent, which would outlast its shutdown.
  long holds() const {
    return alive_.use_count() - 1;
  }

  // Ends the parts in the order of UcxRpcAgent::shutdownImpl(). Idempotent.
  void close() {
    if (std::exchange(isClosed_, true)) {
      return;
    }
    lifetime.close();
    timer.stop();
    const auto wakeLeader = [this] {
      leader_.end();
      messenger.progress().wake();
    };
    EXPECT_EQ(executor->stop(kPatience, wakeLeader), 0u);
    messenger.close(0);
  }

  std::atomic<Timer::TimePoint> now{Timer::Clock::now()};
  const Identity identity;

 private:
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  QuietLeader leader_;
  bool isClosed_ = false;

 public:
  Lifetime lifetime{[this]() -> std::shared_ptr<void> { return alive_; }};
  Timer timer{[this] { return now.load(); }};
  Directory directory;
  DevicesInUse devices;
  const std::shared_ptr<Executor> executor = std::make_shared<Executor>(4, 8, ThreadHooks{}, timer);
  Messenger messenger;
};

// Lets workers take in each other's frames, and the frames that result, often enough to announce, fetch and finish a
// large message.
template <typename... Workers>
void exchange(Workers&... workers) {
  for (int round = 0; round < 8; ++round) {
    (workers.takeIn(), ...);
  }
}

// Returns a message with a body of this size and with a span.
inline std::unique_ptr<OutgoingMessage> makeOutgoing(
    size_t bodyBytes, std::span<const std::byte> span = {}, std::unique_ptr<Lender> lender = nullptr) {
  auto message = std::make_unique<OutgoingMessage>();
  const std::vector<char> body(bodyBytes, 'b');
  message->body.append(body.data(), body.size());
  if (!span.empty()) {
    message->spans.push_back({span});
  }
  message->lender = std::move(lender);
  return message;
}

// A lender that notes its destruction.
class CountingLender final : public Lender {
 public:
  explicit CountingLender(std::atomic<int>& destroyed, bool mayRunUserCode = false)
      : destroyed_(destroyed), mayRunUserCode_(mayRunUserCode) {}
  ~CountingLender() override {
    destroyed_.fetch_add(1);
  }
  bool mayRunUserCode() const override {
    return mayRunUserCode_;
  }

 private:
  std::atomic<int>& destroyed_;
  const bool mayRunUserCode_;
};

} // namespace torch_ucx_rpc
