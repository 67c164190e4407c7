#include "runtime/progress.h"

#include "eventually.h"
#include "outcome.h"
#include "transport/loopback/loopback_transport.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Clock = std::chrono::steady_clock;

// A Progress over a loopback transport whose messages become deliveries.
class Station final : public TransportListener {
 public:
  Station(LoopbackNetwork& network, const std::string& name, Waiting waiting)
      : transport_(network.makeTransport(name)),
        progress(
            *transport_,
            [] {},
            [this](Deliveries deliveries) { dispatched.fetch_add(deliveries.messages.size()); },
            waiting) {
    transport_->setListener(this);
  }
  ~Station() override {
    if (!isClosed_) {
      close();
    }
  }

  void close() {
    isClosed_ = true;
    progress.close([this] { transport_->close(0); });
  }

  void onEager(std::span<const std::byte> header, std::span<const std::byte> /*bytes*/) override {
    IncomingMessage message;
    EXPECT_FALSE(wire::readHeader(header, message.header));
    progress.deliveries().messages.push_back(std::move(message));
  }
  void onParked(std::span<const std::byte> /*header*/, void* parked, uint64_t /*bytes*/) override {
    transport_->refuse(parked);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  void connect(const Station& peer) {
    progress.run([&] { EXPECT_FALSE(transport_->connect(peer.transport_->address(), endpoint_)); });
  }
  void send(uint64_t callId) {
    progress.submit([this, callId] {
      wire::Header header;
      header.callId = callId;
      transport_->send(endpoint_, header, {}, SendMode::kEager, [](Error error) { EXPECT_FALSE(error); });
    });
  }
  // As an operation does that brings something about by itself.
  void deliver(uint64_t callId) {
    IncomingMessage message;
    message.header.callId = callId;
    progress.deliveries().messages.push_back(std::move(message));
  }

 private:
  std::unique_ptr<Transport> transport_;
  EndpointId endpoint_ = 0;
  bool isClosed_ = false;

 public:
  std::atomic<uint64_t> dispatched{0}; // what neither leader nor visitor got
  Progress progress;
};

// Leads, as an agent thread does, until it is told to stop, and hands on what it gets.
class Leader {
 public:
  explicit Leader(
      Progress& progress, std::function<void(Deliveries&)> hand = [](Deliveries&) {})
      : progress_(progress), thread_([this, hand] {
          while (!isStopping_.load()) {
            Deliveries deliveries = progress_.lead([this] { return isStopping_.load(); });
            hand(deliveries);
          }
        }) {}
  ~Leader() {
    isStopping_.store(true);
    progress_.wake();
    thread_.join();
  }

 private:
  Progress& progress_;
  std::atomic<bool> isStopping_{false};
  std::thread thread_;
};

class ProgressTest : public testing::TestWithParam<Waiting> {
 protected:
  LoopbackNetwork network_;
  Station a_{network_, "a", GetParam()};
  Station b_{network_, "b", GetParam()};
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

TEST_P(ProgressTest, WhatAnOperationBringsAboutIsDispatchedWithoutTheLock) {
  a_.progress.submit([&] { a_.deliver(1); });
  EXPECT_EQ(a_.dispatched.load(), 1u);
  a_.progress.run([&] { a_.deliver(2); });
  EXPECT_EQ(a_.dispatched.load(), 2u);
}

TEST_P(ProgressTest, NothingSubmittedIsLostWhileOneLeads) {
  constexpr int kThreads = 8;
  constexpr int kEach = 5000;
  std::vector<int> last(kThreads, -1); // guarded by the worker lock, which TSan checks
  bool isOrdered = true;
  int total = 0;
  {
    const Leader leader(a_.progress);
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
    // Without anything else happening: whoever held the lock last has looked at the queue.
    int seen = 0;
    EXPECT_TRUE(eventually([&] {
      a_.progress.run([&] { seen = total; });
      return seen == kThreads * kEach;
    }));
  }
  EXPECT_TRUE(isOrdered) << "operations of one thread run in its order";
}

TEST_P(ProgressTest, LeaderReturnsWhatArrives) {
  a_.connect(b_);
  std::vector<uint64_t> got;
  std::thread sender([&] {
    for (uint64_t callId = 0; callId < 1000; ++callId) {
      a_.send(callId);
    }
  });
  while (got.size() < 1000) {
    const Deliveries deliveries = b_.progress.lead([] { return false; });
    ASSERT_FALSE(deliveries.empty());
    for (const IncomingMessage& message : deliveries.messages) {
      got.push_back(message.header.callId);
    }
  }
  sender.join();
  EXPECT_TRUE(std::is_sorted(got.begin(), got.end()));
}

TEST_P(ProgressTest, LeadEndsWhenItIsDone) {
  EXPECT_TRUE(a_.progress.lead([] { return true; }).empty());
}

TEST_P(ProgressTest, WakeEndsASleepThatIsDone) {
  std::atomic<bool> isDone{false};
  std::thread waker([&] {
    isDone.store(true);
    a_.progress.wake();
  });
  EXPECT_TRUE(a_.progress.lead([&] { return isDone.load(); }).empty());
  waker.join();
}

// A call in miniature, thousands of times: a caller that waits as a visitor sends to an echo, while an agent thread leads. Each
// answer is delivered once, to either of the two, and none is left lying.
TEST_P(ProgressTest, NoAnswerIsLostBetweenLeaderAndVisitor) {
  constexpr uint64_t kCalls = 5000;
  a_.connect(b_);
  b_.connect(a_);
  std::atomic<uint64_t> answers{0};
  std::atomic<uint64_t> toVisitor{0};
  const Leader echo(b_.progress, [&](Deliveries& deliveries) {
    for (const IncomingMessage& message : deliveries.messages) {
      b_.send(message.header.callId);
    }
  });
  const Leader leader(a_.progress, [&](Deliveries& deliveries) {
    answers.fetch_add(deliveries.messages.size());
    if (!deliveries.messages.empty()) {
      a_.progress.wake(); // as the agent does when another thread completes a call
    }
  });
  auto slowest = Clock::duration::zero();
  for (uint64_t call = 1; call <= kCalls; ++call) {
    a_.send(call);
    const auto began = Clock::now();
    const auto isAnswered = [&] { return answers.load() + a_.dispatched.load() >= call; };
    while (!isAnswered()) {
      const Deliveries deliveries = a_.progress.visit(isAnswered);
      answers.fetch_add(deliveries.messages.size());
      toVisitor.fetch_add(deliveries.messages.size());
    }
    a_.progress.leave();
    slowest = std::max(slowest, Clock::now() - began);
  }
  EXPECT_EQ(answers.load() + a_.dispatched.load(), kCalls);
  RecordProperty("answers_to_the_visitor", std::to_string(toVisitor.load()));
  // A lost wake-up shows as a sleep of its full bound, half a second.
  EXPECT_LT(std::chrono::duration<double>(slowest).count(), 0.45);
}

TEST_P(ProgressTest, VisitorThatLeavesHandsOverToTheLeader) {
  a_.connect(b_);
  b_.connect(a_);
  std::atomic<uint64_t> got{0};
  const Leader leader(b_.progress, [&](Deliveries& deliveries) { got.fetch_add(deliveries.messages.size()); });
  auto slowest = Clock::duration::zero();
  for (uint64_t round = 1; round <= 500; ++round) {
    std::atomic<bool> isAway{false};
    std::thread visitor([&] {
      Deliveries deliveries = b_.progress.visit([&] { return isAway.load(); });
      got.fetch_add(deliveries.messages.size());
      b_.progress.leave();
    });
    if (round % 2 == 0) {
      isAway.store(true);
      b_.progress.wake();
    }
    const auto began = Clock::now();
    a_.send(round);
    ASSERT_TRUE(eventually([&] { return got.load() + b_.dispatched.load() == round; })) << round;
    slowest = std::max(slowest, Clock::now() - began);
    isAway.store(true);
    ASSERT_TRUE(eventually([&] {
      b_.progress.wake();
      return true;
    }));
    visitor.join();
  }
  EXPECT_LT(std::chrono::duration<double>(slowest).count(), 0.45);
}

TEST_P(ProgressTest, WatchedDescriptorRunsItsOperationOnce) {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  ASSERT_GE(fd, 0);
  std::atomic<int> runs{0};
  a_.progress.watch(fd, [&] { runs.fetch_add(1); });
  {
    const Leader leader(a_.progress);
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
      (void)a_.progress.lead([&] { return hasEnded.load(); });
    }
  });
  hasEnded.store(true);
  a_.close();
  leader.join();
  bool hasRun = false;
  a_.progress.submit([&] { hasRun = true; });
  EXPECT_TRUE(hasRun) << "what they own must not stay queued";
  EXPECT_TRUE(a_.progress.lead([] { return false; }).empty()) << "returns at once";
  EXPECT_TRUE(a_.progress.visit([] { return false; }).empty());
  a_.progress.leave();
}

TEST_P(ProgressTest, CloseAmidSubmissionsLosesNone) {
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
