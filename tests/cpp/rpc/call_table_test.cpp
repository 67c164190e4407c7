#include "rpc/call_table.h"

#include "eventually.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Clock = CallTable::Clock;
using std::chrono::milliseconds;

constexpr auto kNever = Clock::time_point::max();

std::unique_ptr<Peer> makePeer(Rank rank) {
  Member member;
  member.rank = rank;
  member.name = "w" + std::to_string(rank);
  member.session = 100 + static_cast<uint64_t>(rank);
  return std::make_unique<Peer>(std::move(member));
}

class CallTableTest : public testing::Test {
 protected:
  CallTable::Call call(Peer& to, Clock::time_point deadline = kNever) const {
    CallTable::Call made;
    made.future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
    made.to = &to;
    made.deadline = deadline;
    return made;
  }
  uint64_t open(Peer& to, Clock::time_point deadline = kNever) {
    return table_.open(call(to, deadline), isEarliest_);
  }

  const std::unique_ptr<Peer> a_ = makePeer(0);
  const std::unique_ptr<Peer> b_ = makePeer(1);
  CallTable table_;
  bool isEarliest_ = false;
};

TEST_F(CallTableTest, TakenCallIsGone) {
  CallTable::Call opened = call(*a_);
  const JitFuture* const future = opened.future.get();
  const uint64_t id = table_.open(std::move(opened), isEarliest_);
  EXPECT_TRUE(table_.isOpen(id, *a_));
  EXPECT_FALSE(table_.isOpen(id, *b_)) << "another peer was asked";
  EXPECT_FALSE(table_.isOpen(id + 1, *a_));
  EXPECT_EQ(table_.size(), 1u);

  EXPECT_FALSE(table_.take(id, *b_)) << "an answer of a worker that was not asked";
  const std::optional<CallTable::Call> taken = table_.take(id, *a_);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->future.get(), future);
  EXPECT_EQ(taken->to, a_.get());
  EXPECT_FALSE(table_.take(id, *a_));
  EXPECT_FALSE(table_.isOpen(id, *a_));
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(CallTableTest, IdsAreNotUsedAgain) {
  const uint64_t first = open(*a_);
  ASSERT_TRUE(table_.take(first, *a_));
  const uint64_t second = open(*a_);
  EXPECT_NE(first, second);
  EXPECT_FALSE(table_.take(first, *a_)) << "an answer to an earlier call does not complete a later one";
  EXPECT_EQ(table_.opened(), 2u);
}

TEST_F(CallTableTest, TellsWhetherADeadlineIsTheEarliest) {
  const Clock::time_point now = Clock::now();
  open(*a_);
  EXPECT_FALSE(isEarliest_) << "without a deadline";
  open(*a_, now + milliseconds(50));
  EXPECT_TRUE(isEarliest_);
  open(*a_, now + milliseconds(90));
  EXPECT_FALSE(isEarliest_);
  open(*a_, now + milliseconds(10));
  EXPECT_TRUE(isEarliest_);
}

TEST_F(CallTableTest, DeadlinesComeInOrder) {
  const Clock::time_point start = Clock::now();
  std::array<int, 9> order = {5, 1, 8, 3, 2, 7, 4, 6, 9};
  std::vector<uint64_t> ids(10);
  for (const int at : order) {
    ids[static_cast<size_t>(at)] = open(*a_, start + milliseconds(at));
  }
  const uint64_t endless = open(*a_);
  Clock::time_point next;
  EXPECT_TRUE(table_.takeExpired(start, next).empty());
  EXPECT_EQ(next, start + milliseconds(1));
  std::vector<CallTable::Expired> expired = table_.takeExpired(start + milliseconds(4), next);
  ASSERT_EQ(expired.size(), 4u);
  for (size_t at = 0; at < expired.size(); ++at) {
    EXPECT_EQ(expired[at].id, ids[at + 1]);
  }
  EXPECT_EQ(next, start + milliseconds(5));
  ASSERT_TRUE(table_.take(ids[5], *a_)); // answered in time
  expired = table_.takeExpired(start + std::chrono::hours(1), next);
  EXPECT_EQ(expired.size(), 4u);
  EXPECT_EQ(next, kNever);
  EXPECT_TRUE(table_.isOpen(endless, *a_));
}

TEST_F(CallTableTest, EqualDeadlinesExpireTogether) {
  const Clock::time_point due = Clock::now();
  for (int count = 0; count < 5; ++count) {
    open(*a_, due);
  }
  Clock::time_point next;
  EXPECT_EQ(table_.takeExpired(due, next).size(), 5u);
}

TEST_F(CallTableTest, TakeAllCanTakeTheCallsOfOnePeer) {
  const Clock::time_point due = Clock::now();
  for (int count = 0; count < 6; ++count) {
    open(count % 2 == 0 ? *a_ : *b_, count < 3 ? due : kNever);
  }
  const std::vector<CallTable::Call> calls = table_.takeAll(a_.get());
  EXPECT_EQ(calls.size(), 3u);
  EXPECT_TRUE(std::all_of(calls.begin(), calls.end(), [this](const auto& call) { return call.to == a_.get(); }));
  Clock::time_point next;
  EXPECT_EQ(table_.takeExpired(due, next).size(), 1u) << "their deadlines are gone too";
  EXPECT_EQ(table_.size(), 2u);
}

TEST_F(CallTableTest, TableIsEmptyAndUsableAfterTakeAll) {
  const Clock::time_point due = Clock::now();
  for (int count = 0; count < 6; ++count) {
    open(*a_, count < 3 ? due : kNever);
  }
  EXPECT_EQ(table_.takeAll().size(), 6u);
  EXPECT_EQ(table_.size(), 0u);
  Clock::time_point next;
  EXPECT_TRUE(table_.takeExpired(due, next).empty());
  open(*a_, due);
  EXPECT_TRUE(isEarliest_);
}

// All threads that can end a call try at once, and exactly one takes each call out.
TEST_F(CallTableTest, EachCallLeavesExactlyOnce) {
  constexpr uint64_t kCalls = 40'000;
  std::vector<std::atomic<int>> taken(kCalls);
  const auto note = [&taken](const CallTable::Call& call) {
    const auto id = static_cast<size_t>(call.timeout.count()); // the timeout holds the call's id
    taken[id].fetch_add(1);
  };
  std::atomic<uint64_t> opened{0};
  std::atomic<bool> isOver{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    std::mt19937 random(1);
    for (uint64_t count = 0; count < kCalls; ++count) {
      CallTable::Call made;
      made.to = count % 3 == 0 ? b_.get() : a_.get();
      made.timeout = milliseconds(count);
      if (random() % 2 == 0) {
        made.deadline = Clock::now() + std::chrono::microseconds(random() % 200);
      }
      bool isEarliest = false;
      EXPECT_EQ(table_.open(std::move(made), isEarliest), count);
      opened.store(count + 1);
    }
    isOver.store(true);
  });
  for (unsigned id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] { // responses
      std::mt19937 random(id);
      while (!isOver.load()) {
        const uint64_t latest = opened.load();
        if (latest == 0) {
          continue;
        }
        const uint64_t answered = latest - 1 - random() % std::min<uint64_t>(latest, 64);
        if (const auto call = table_.take(answered, answered % 3 == 0 ? *b_ : *a_)) {
          note(*call);
        }
      }
    });
  }
  threads.emplace_back([&] { // deadlines
    while (!isOver.load()) {
      Clock::time_point next;
      for (const CallTable::Expired& expired : table_.takeExpired(Clock::now(), next)) {
        EXPECT_EQ(expired.id, static_cast<uint64_t>(expired.call.timeout.count()));
        note(expired.call);
      }
    }
  });
  threads.emplace_back([&] { // failures of a peer
    while (!isOver.load()) {
      for (const CallTable::Call& call : table_.takeAll(b_.get())) {
        EXPECT_EQ(call.to, b_.get());
        note(call);
      }
    }
  });
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const CallTable::Call& call : table_.takeAll()) { // shutdown
    note(call);
  }
  EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](const auto& count) { return count.load() == 1; }));
  EXPECT_EQ(table_.size(), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
