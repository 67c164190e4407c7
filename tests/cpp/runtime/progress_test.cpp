#include "runtime/progress.h"

#include "eventually.h"
#include "loopback_transport.h"
#include "outcome.h"
#include "stalls.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Clock = std::chrono::steady_clock;

// A Progress over a loopback transport. Each message becomes an event, its call id.
class TestEndpoint final : public TransportListener, private ProgressClient {
 public:
  // Called with the call ids of a batch, and the driver role of the thread that hands them out.
  using Hand = std::function<void(const std::vector<uint64_t>& calls, const std::optional<Driver>& driver)>;

  TestEndpoint(LoopbackNetwork& network, const std::string& name, Waiting waiting)
      : transport_(network.makeTransport(name)), progress(*transport_, *this, waiting) {
    transport_->setListener(this);
  }
  ~TestEndpoint() override {
    if (!isClosed_) {
      close();
    }
  }

  void close() {
    isClosed_ = true;
    progress.close([this] { transport_->close(0); });
  }

  void onEager(std::span<const std::byte> headerBytes, std::span<const std::byte> /*bytes*/) override {
    wire::Header header;
    EXPECT_FALSE(wire::readHeader(headerBytes, header));
    arrive(header.callId);
  }
  void onRendezvous(std::span<const std::byte> /*header*/, void* rendezvous, uint64_t /*bytes*/) override {
    transport_->release(rendezvous);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  void connect(const TestEndpoint& peer) {
    progress.run([&] { EXPECT_FALSE(transport_->connect(peer.transport_->address(), endpoint_)); });
  }
  void send(uint64_t callId) {
    progress.submit([this, callId] {
      wire::Header header;
      header.callId = callId;
      transport_->send(endpoint_, header, {}, SendMode::kEager, [](Error error) { EXPECT_FALSE(error); });
    });
  }
  // Makes an event. The caller holds the worker lock.
  void arrive(uint64_t callId) {
    pending_.push_back(callId);
  }
  // Call it before threads drive.
  void handTo(Hand hand) {
    hand_ = std::move(hand);
  }
  // Wakes the waiting caller, as the agent does when another thread completes a call. Call it before threads drive.
  void wakeCallerForLeader() {
    handTo([this](const std::vector<uint64_t>& /*calls*/, const std::optional<Driver>& driver) {
      if (driver && driver->role == Role::kLeader) {
        progress.wakeWaitingCaller();
      }
    });
  }

  std::atomic<uint64_t> withoutDriver{0}; // calls that were handed out by threads that did not drive
  std::atomic<uint64_t> toLeaders{0};
  std::atomic<uint64_t> toWaitingCaller{0};
  std::atomic<int> deferredStarts{0};
  // A device's message is ready after this many questions. The worker lock guards it.
  int questionsUntilReady = 0;
  static constexpr uint64_t kReady = 77; // the call id of that message
  bool asksAgain = false; // some starts ask for another one; the worker lock guards it
  uint64_t all() const {
    return withoutDriver.load() + toLeaders.load() + toWaitingCaller.load();
  }

 private:
  class Batch final : public EventBatch {
   public:
    Batch(TestEndpoint& endpoint, std::vector<uint64_t> calls) : endpoint_(endpoint), calls_(std::move(calls)) {}
    void dispatch(const std::optional<Driver>& driver) override {
      std::atomic<uint64_t>& count = !driver ? endpoint_.withoutDriver
          : driver->role == Role::kLeader    ? endpoint_.toLeaders
                                             : endpoint_.toWaitingCaller;
      count.fetch_add(calls_.size());
      if (endpoint_.hand_) {
        endpoint_.hand_(calls_, driver);
      }
    }

   private:
    TestEndpoint& endpoint_;
    const std::vector<uint64_t> calls_;
  };

  void startDeferredWithWorkerLock() override {
    if (deferredStarts.fetch_add(1) % 3 == 0 && asksAgain) {
      progress.requestStartDeferredWithWorkerLock();
    }
    if (questionsUntilReady != 0 && --questionsUntilReady == 0) {
      arrive(kReady);
    }
  }
  bool waitsForDeviceWithWorkerLock() const override {
    return questionsUntilReady != 0;
  }
  bool hasEventsWithWorkerLock() const override {
    return !pending_.empty();
  }
  std::unique_ptr<EventBatch> takeEventsWithWorkerLock() override {
    return pending_.empty() ? nullptr : std::make_unique<Batch>(*this, std::exchange(pending_, {}));
  }

  std::unique_ptr<Transport> transport_;
  EndpointId endpoint_ = 0;
  bool isClosed_ = false;
  Hand hand_;
  std::vector<uint64_t> pending_; // guarded by the worker lock

 public:
  Progress progress;
};

// Leads once. Returns false if there was nothing to hand out.
template <typename IsDone>
bool lead(TestEndpoint& endpoint, IsDone isDone) {
  const std::unique_ptr<EventBatch> events = endpoint.progress.lead(isDone);
  if (events != nullptr) {
    events->dispatch(Driver{Role::kLeader, std::nullopt});
  }
  return events != nullptr;
}

// Leads like an agent thread, until stopped.
class LeadingThread {
 public:
  explicit LeadingThread(TestEndpoint& endpoint)
      : endpoint_(endpoint), thread_([this] {
          while (!isStopping_.load()) {
            (void)lead(endpoint_, [this] { return isStopping_.load(); });
          }
        }) {}
  ~LeadingThread() {
    isStopping_.store(true);
    endpoint_.progress.wake();
    thread_.join();
  }

 private:
  TestEndpoint& endpoint_;
  std::atomic<bool> isStopping_{false};
  std::thread thread_;
};

std::chrono::duration<double> median(std::vector<Clock::duration>& times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

class ProgressTest : public testing::TestWithParam<Waiting> {
 protected:
  LoopbackNetwork network_;
  TestEndpoint a_{network_, "a", GetParam()};
  TestEndpoint b_{network_, "b", GetParam()};
};

std::string nameOf(const testing::TestParamInfo<Waiting>& info) {
  static constexpr const char* kNames[] = {"auto", "poll", "sleep"};
  return kNames[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(
    Waiting, ProgressTest, testing::Values(Waiting::kAuto, Waiting::kPoll, Waiting::kSleep), nameOf);

TEST_P(ProgressTest, OperationRunsAtOnceWhereTheLockIsFree) {
  bool hasRun = false;
  a_.progress.submit([&] { hasRun = true; });
  EXPECT_TRUE(hasRun);
}

TEST_P(ProgressTest, OperationMaySubmitAnother) {
  std::vector<int> order;
  a_.progress.submit([&] {
    order.push_back(1);
    a_.progress.submit([&] { order.push_back(2); });
    order.push_back(3);
  });
  EXPECT_EQ(order, (std::vector<int>{1, 3, 2}));
}

TEST_P(ProgressTest, EventsOfAnOperationAreDispatchedWithoutTheLock) {
  std::vector<uint64_t> got;
  a_.handTo([&](const std::vector<uint64_t>& calls, const std::optional<Driver>& driver) {
    EXPECT_FALSE(driver) << "it has only submitted an operation";
    a_.progress.run([&] { got.insert(got.end(), calls.begin(), calls.end()); }); // run() takes the lock
  });
  a_.progress.submit([&] { a_.arrive(1); });
  EXPECT_EQ(got, std::vector<uint64_t>{1});
  a_.progress.run([&] { a_.arrive(2); });
  EXPECT_EQ(got, (std::vector<uint64_t>{1, 2}));
}

TEST_P(ProgressTest, DeferredWorkIsStartedOnRequest) {
  const int before = a_.deferredStarts.load();
  a_.progress.requestStartDeferred();
  EXPECT_EQ(a_.deferredStarts.load(), before + 1);
  a_.progress.submit([&] { a_.progress.requestStartDeferredWithWorkerLock(); });
  EXPECT_EQ(a_.deferredStarts.load(), before + 2) << "one start after the operation is enough for its request";
}

// If only the timer asked the device, a message would wait up to 50 us, and for a wake-up.
TEST_P(ProgressTest, DriverAsksADeviceAgainBeforeItSleeps) {
  if (Spinning::usableCores() < 2) {
    GTEST_SKIP() << "the other side may need the core";
  }
  bool isReady = false;
  for (int attempt = 0; attempt < 100 && !isReady; ++attempt) { // the thread may be interrupted for too long
    a_.progress.run([&] { a_.questionsUntilReady = 3; });
    int asked = 0;
    (void)a_.progress.lead([&] { return ++asked == 2; }); // it asks a second time right before it sleeps
    a_.progress.run([&] { isReady = a_.questionsUntilReady == 0; });
  }
  EXPECT_TRUE(isReady);
}

// The timer makes such requests while a device works, which may take seconds.
TEST_P(ProgressTest, RequestsToLookAgainDoNotKeepADriverAwake) {
  if (GetParam() == Waiting::kPoll) {
    return; // a polling driver never sleeps
  }
  a_.progress.run([&] {
    a_.questionsUntilReady = std::numeric_limits<int>::max();
    a_.asksAgain = true;
  });
  const LeadingThread leader(a_);
  EXPECT_TRUE(eventually([&] {
    const int before = a_.deferredStarts.load();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return a_.deferredStarts.load() == before;
  }));
}

TEST_P(ProgressTest, NoSubmittedOperationIsLostWhileAThreadLeads) {
  constexpr int kThreads = 8;
  constexpr int kEach = 5000;
  std::vector<int> last(kThreads, -1); // guarded by the worker lock, which TSan checks
  bool isOrdered = true;
  int total = 0;
  {
    const LeadingThread leader(a_);
    std::vector<std::thread> submitters;
    for (int id = 0; id < kThreads; ++id) {
      submitters.emplace_back([&, id] {
        for (int number = 0; number < kEach; ++number) {
          a_.progress.submit([&, id, number] {
            isOrdered = isOrdered && last[static_cast<size_t>(id)] == number - 1;
            last[static_cast<size_t>(id)] = number;
            ++total;
          });
        }
      });
    }
    for (std::thread& submitter : submitters) {
      submitter.join();
    }
    // No other event is needed: the last holder of the lock has checked the queue.
    int seen = 0;
    EXPECT_TRUE(eventually([&] {
      a_.progress.run([&] { seen = total; });
      return seen == kThreads * kEach;
    }));
  }
  EXPECT_TRUE(isOrdered) << "operations of one thread run in its order";
}

TEST_P(ProgressTest, LeaderReturnsArrivedMessages) {
  a_.connect(b_);
  std::vector<uint64_t> got;
  b_.handTo([&](const std::vector<uint64_t>& calls, const std::optional<Driver>& /*driver*/) {
    got.insert(got.end(), calls.begin(), calls.end());
  });
  std::thread sender([&] {
    for (uint64_t callId = 0; callId < 1000; ++callId) {
      a_.send(callId);
    }
  });
  while (got.size() < 1000) {
    ASSERT_TRUE(lead(b_, [] { return false; }));
  }
  sender.join();
  EXPECT_TRUE(std::is_sorted(got.begin(), got.end()));
}

TEST_P(ProgressTest, LeadEndsWhenItsConditionHolds) {
  EXPECT_FALSE(lead(a_, [] { return true; }));
}

TEST_P(ProgressTest, WakeEndsASleepWhoseConditionHolds) {
  std::atomic<bool> isDone{false};
  std::thread waker([&] {
    isDone.store(true);
    a_.progress.wake();
  });
  EXPECT_FALSE(lead(a_, [&] { return isDone.load(); }));
  waker.join();
}

TEST_P(ProgressTest, OneCallerDrivesAtATime) {
  std::atomic<bool> isDone{false};
  std::thread first([&] {
    while (!isDone.load()) { // the other thread may drive, and a turn lasts up to half a second
      (void)a_.progress.driveUntil([&] { return isDone.load(); }, 1);
    }
  });
  EXPECT_TRUE(eventually([&] { return !a_.progress.driveUntil([] { return true; }, 2); }))
      << "false tells the second caller to wait in another way";
  isDone.store(true);
  a_.progress.wake();
  first.join();
  EXPECT_TRUE(a_.progress.driveUntil([] { return true; }, 3));
}

TEST_P(ProgressTest, DriverNamesTheAwaitedCall) {
  a_.connect(b_);
  std::atomic<uint64_t> awaited{0};
  b_.handTo([&](const std::vector<uint64_t>& calls, const std::optional<Driver>& driver) {
    if (driver && driver->role == Role::kWaitingCaller) {
      awaited.store(driver->awaitedCall.value_or(0));
    }
    EXPECT_EQ(calls, std::vector<uint64_t>{1});
  });
  a_.send(1);
  while (b_.all() == 0) {
    EXPECT_TRUE(b_.progress.driveUntil([&] { return b_.all() != 0; }, 7));
  }
  EXPECT_EQ(awaited.load(), 7u);
}

// Small calls, thousands of times: a caller that drives while it waits sends to an echo, while an agent thread leads.
// One of the two gets each answer, once.
TEST_P(ProgressTest, NoAnswerIsLostBetweenLeaderAndWaitingCaller) {
  constexpr uint64_t kCalls = 5000;
  a_.connect(b_);
  b_.connect(a_);
  b_.handTo([&](const std::vector<uint64_t>& calls, const std::optional<Driver>& /*driver*/) {
    for (const uint64_t call : calls) {
      b_.send(call);
    }
  });
  a_.wakeCallerForLeader();
  const LeadingThread echo(b_);
  const LeadingThread leader(a_);
  const Stalls stalls;
  auto slowest = Clock::duration::zero();
  for (uint64_t call = 1; call <= kCalls; ++call) {
    a_.send(call);
    const auto began = Clock::now();
    const auto isAnswered = [&] { return a_.all() >= call; };
    while (!isAnswered()) {
      EXPECT_TRUE(a_.progress.driveUntil(isAnswered, call));
    }
    slowest = std::max(slowest, Clock::now() - began);
  }
  EXPECT_EQ(a_.all(), kCalls);
  RecordProperty("answers_to_the_waiting_caller", std::to_string(a_.toWaitingCaller.load()));
  // A lost wake-up shows as a sleep of its full bound, half a second.
  EXPECT_LT(std::chrono::duration<double>(slowest).count(), 0.45 + stalls.seconds());
}

TEST_P(ProgressTest, CallerThatEndsHandsOverToTheLeader) {
  a_.connect(b_);
  const LeadingThread leader(b_);
  const Stalls stalls;
  auto slowest = Clock::duration::zero();
  for (uint64_t round = 1; round <= 500; ++round) {
    std::atomic<bool> isOver{false};
    std::thread caller(
        [&] { (void)b_.progress.driveUntil([&] { return isOver.load() || b_.all() == round; }, std::nullopt); });
    if (round % 2 == 0) {
      isOver.store(true);
      b_.progress.wake();
    }
    const auto began = Clock::now();
    a_.send(round);
    ASSERT_TRUE(eventually([&] { return b_.all() == round; })) << round;
    slowest = std::max(slowest, Clock::now() - began);
    isOver.store(true);
    b_.progress.wake();
    caller.join();
  }
  EXPECT_LT(std::chrono::duration<double>(slowest).count(), 0.45 + stalls.seconds());
}

// A leader that wakes up for nothing wakes the waiting caller, and lets it drive. The caller ends and arms the
// transport.
TEST_P(ProgressTest, LeaderTakesOverFromACallerThatItWoke) {
  constexpr uint64_t kRounds = 101;
  a_.connect(b_);
  std::vector<Clock::duration> delays;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    std::atomic<bool> isOver{false};
    std::thread caller([&] { (void)b_.progress.driveUntil([&] { return isOver.load(); }, std::nullopt); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const LeadingThread leader(b_); // the leader goes to sleep last, so it wakes first
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    isOver.store(true);
    b_.progress.wake();
    caller.join();
    const auto began = Clock::now();
    a_.send(round);
    ASSERT_TRUE(eventually([&] { return b_.all() == round; })) << round;
    delays.push_back(Clock::now() - began);
  }
  EXPECT_LT(median(delays).count(), 0.01); // a leader that misses this leaves each message for 20 ms
}

// While the caller is away for short times, a leader polls. After longer absences, which the leader does not see, the
// caller arms the transport and goes.
TEST_P(ProgressTest, LeaderThatPollsTakesOverFromACallerThatArms) {
  constexpr uint64_t kRounds = 51;
  a_.connect(b_);
  b_.wakeCallerForLeader();
  const LeadingThread leader(b_);
  std::vector<Clock::duration> delays;
  uint64_t sent = 0;
  const auto receive = [&] {
    a_.send(++sent);
    (void)b_.progress.driveUntil([&] { return b_.all() == sent; }, std::nullopt);
  };
  for (uint64_t round = 1; round <= kRounds; ++round) {
    for (int time = 0; time < 16; ++time) {
      receive();
    }
    for (int time = 0; time < 4; ++time) {
      const auto until = Clock::now() + Spinning::kShortAbsence + std::chrono::microseconds(50);
      while (Clock::now() < until) {
      }
      receive();
    }
    const auto began = Clock::now();
    a_.send(++sent);
    ASSERT_TRUE(eventually([&] { return b_.all() == sent; })) << round;
    delays.push_back(Clock::now() - began);
  }
  EXPECT_LT(median(delays).count(), 0.01);
}

TEST_P(ProgressTest, WatchedDescriptorRunsItsOperationOnce) {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  ASSERT_GE(fd, 0);
  std::atomic<int> runs{0};
  a_.progress.watch(fd, [&] { runs.fetch_add(1); });
  {
    const LeadingThread leader(a_);
    const uint64_t one = 1;
    ASSERT_EQ(write(fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    EXPECT_TRUE(eventually([&] { return runs.load() == 1; }));
    ASSERT_EQ(write(fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
  EXPECT_EQ(runs.load(), 1);
  close(fd);
}

TEST_P(ProgressTest, CloseEndsTheLeaderAndLaterOperationsStillRun) {
  std::atomic<bool> hasEnded{false};
  std::thread leader([&] {
    while (!hasEnded.load()) {
      (void)lead(a_, [&] { return hasEnded.load(); });
    }
  });
  hasEnded.store(true);
  a_.close();
  leader.join();
  bool hasRun = false;
  a_.progress.submit([&] { hasRun = true; });
  EXPECT_TRUE(hasRun) << "what they own must not stay queued";
  EXPECT_FALSE(lead(a_, [] { return false; })) << "returns at once";
  EXPECT_TRUE(a_.progress.driveUntil([] { return false; }, std::nullopt)) << "likewise";
}

TEST_P(ProgressTest, CloseComesAfterEarlierOperations) {
  std::vector<std::string> order;
  a_.handTo([&](const std::vector<uint64_t>& /*calls*/, const std::optional<Driver>& /*driver*/) {
    a_.progress.close([&] { order.emplace_back("closed"); });
  });
  a_.progress.run([&] {
    a_.arrive(1); // this thread hands out the batch before it checks the queue again
    a_.progress.submit([&] { order.emplace_back("sent"); });
  });
  EXPECT_EQ(order, (std::vector<std::string>{"sent", "closed"})) << "a message sent last has to leave";
}

TEST_P(ProgressTest, CloseDuringSubmissionsLosesNoOperation) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::atomic<int> total{0};
  std::vector<std::thread> submitters;
  for (int id = 0; id < kThreads; ++id) {
    submitters.emplace_back([&] {
      for (int number = 0; number < kEach; ++number) {
        a_.progress.submit([&] { total.fetch_add(1); });
      }
    });
  }
  ASSERT_TRUE(eventually([&] { return total.load() > 100; }));
  a_.close();
  for (std::thread& submitter : submitters) {
    submitter.join();
  }
  EXPECT_EQ(total.load(), kThreads * kEach);
}

} // namespace
} // namespace torch_ucx_rpc
