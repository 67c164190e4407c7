// The receive window: admitted messages, waiting messages, and the end of each wait.

#include "agent_fixture.h"

namespace torch_ucx_rpc {
namespace {

class AgentWindowTest : public AgentTest {
 protected:
  static AgentOptions tiny(size_t threads = 16) {
    AgentOptions options;
    options.receiveWindowBytes = kMiB;
    options.numWorkerThreads = threads;
    return options;
  }
};

TEST_F(AgentWindowTest, NeverTakesInMoreThanItsLimit) {
  std::atomic<uint64_t> most{0};
  start(
      2,
      [&](Message& request) {
        const uint64_t now = metric(1, "window.in_use_bytes");
        uint64_t before = most.load();
        while (before < now && !most.compare_exchange_weak(before, now)) {
        }
        return completed(textOf(request));
      },
      tiny(4));
  std::vector<Future> calls;
  for (int number = 0; number < 60; ++number) {
    calls.push_back(call(0, 1, std::to_string(number), {tensorOf(300 * kKiB, number), tensorOf(100 * kKiB, number)}));
  }
  for (int number = 0; number < 60; ++number) {
    EXPECT_EQ(textOf(*answer(calls[static_cast<size_t>(number)])), std::to_string(number));
  }
  EXPECT_LE(most.load(), kMiB);
  EXPECT_GT(most.load(), 0u);
  EXPECT_EQ(metric(1, "window.in_use_bytes"), 0u);
}

TEST_F(AgentWindowTest, MessageLargerThanTheWindowPassesAlone) {
  start(2, &echo, tiny());
  std::vector<Future> calls;
  for (int number = 0; number < 6; ++number) {
    calls.push_back(call(0, 1, std::to_string(number), {tensorOf((number % 2 == 0 ? 8 : 1) * kMiB / 2, number)}));
  }
  for (int number = 0; number < 6; ++number) {
    EXPECT_TRUE(isAll(answer(calls[static_cast<size_t>(number)])->tensors()[0], number));
  }
}

// The window cannot hold back eager bodies, so the sender limits them.
TEST_F(AgentWindowTest, ManySmallBodiesWaitAtTheSender) {
  std::atomic<uint64_t> eagerBytes{0};
  constexpr size_t kCalls = 300;
  const std::string text(60 * kKiB, 'x');
  network_.setFault([&](const wire::Header& header, SendMode mode) {
    eagerBytes.fetch_add(header.kind == wire::Kind::kRequest && mode == SendMode::kEager ? text.size() : 0);
    return Fate::kDeliver;
  });
  start(2, [&](Message& request) {
    gate_->pass();
    return completed(std::to_string(request.payload().size()));
  });
  for (int round = 0; round < 2; ++round) { // credit returns with the answer of a call
    std::vector<Future> calls;
    for (size_t number = 0; number < kCalls; ++number) {
      calls.push_back(call(0, 1, text));
    }
    // A send may still wait for the worker lock.
    EXPECT_TRUE(eventually([&] { return eagerBytes.load() > EagerCredit::kMaxBytesOfLarger - 2 * text.size(); }));
    if (round == 0) {
      EXPECT_LE(eagerBytes.load(), EagerCredit::kMaxBytesOfLarger);
      gate_->open();
    }
    for (const Future& future : calls) {
      EXPECT_EQ(textOf(*answer(future)), std::to_string(text.size()));
    }
    eagerBytes.store(0);
  }
  network_.setFault({});
}

TEST_F(AgentWindowTest, HandlerThatKeepsItsTensorsDoesNotStallTheWindow) {
  std::mutex mutex;
  std::vector<at::Tensor> kept;
  start(
      2,
      [&](Message& request) {
        const std::lock_guard lock(mutex);
        kept.push_back(request.tensors()[0]);
        return completed("kept");
      },
      tiny());
  for (int number = 0; number < 10; ++number) {
    EXPECT_EQ(textOf(*answer(call(0, 1, "keep", {tensorOf(kMiB, number)}, 5.f))), "kept");
  }
  for (int number = 0; number < 10; ++number) {
    EXPECT_TRUE(isAll(kept[static_cast<size_t>(number)], number));
  }
  kept.clear();
}

// Each call makes the next one in the other direction before it answers, all with tensors that fill the window.
TEST_F(AgentWindowTest, NestedLargeCallsBothWaysDoNotDeadlock) {
  start(
      2,
      [this](Message& request) {
        const int depth = request.payload().at(0) - '0';
        const auto self = static_cast<worker_id_t>(request.payload().at(1) - '0');
        if (depth > 0) {
          const std::string next = {static_cast<char>('0' + depth - 1), static_cast<char>('0' + (1 - self))};
          (void)answer(call(self, static_cast<worker_id_t>(1 - self), next, {tensorOf(700 * kKiB, depth)}, 20.f));
        }
        return completed("done", {tensorOf(700 * kKiB, depth)});
      },
      tiny(32));
  std::vector<Future> calls;
  for (int number = 0; number < 8; ++number) {
    const worker_id_t from = number % 2;
    calls.push_back(call(
        from, static_cast<worker_id_t>(1 - from), {'5', static_cast<char>('1' - from)}, {tensorOf(700 * kKiB)}, 20.f));
  }
  for (const Future& future : calls) {
    EXPECT_TRUE(isAll(answer(future)->tensors()[0], 5));
  }
}

// If handlers wait for each other without calls of their own, the window is stalled. It admits one more message after a
// while.
TEST_F(AgentWindowTest, StalledWindowAdmitsTheNextMessage) {
  start(
      2,
      [this](Message& request) {
        if (textOf(request) == "wait") {
          gate_->pass();
        } else {
          gate_->open();
        }
        return completed(textOf(request));
      },
      tiny());
  const Future waiting = call(0, 1, "wait", {tensorOf(kMiB)}, 20.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  const Future opening = call(0, 1, "open", {tensorOf(kMiB)}, 20.f);
  EXPECT_EQ(textOf(*answer(opening)), "open");
  EXPECT_EQ(textOf(*answer(waiting)), "wait");
}

// A future's callback runs when the answer has arrived. Like a handler, it may make calls and wait.
TEST_F(AgentWindowTest, CallbackThatWaitsForALargeAnswerGetsIt) {
  start(2, &echo, tiny());
  const auto nested = std::make_shared<std::atomic<int>>(0);
  std::vector<Future> calls;
  for (int number = 0; number < 4; ++number) {
    const Future future = call(0, 1, "outer", {tensorOf(700 * kKiB)}, 20.f);
    future->addCallback([this, nested](JitFuture& /*outer*/) {
      const Future inner = call(0, 1, "inner", {tensorOf(700 * kKiB)}, 4.f);
      if (eventually([&] { return inner->completed(); }) && !inner->hasError()) {
        nested->fetch_add(1);
      }
    });
    calls.push_back(future);
  }
  for (const Future& future : calls) {
    (void)answer(future);
  }
  EXPECT_TRUE(eventually([&] { return nested->load() == 4; }, std::chrono::seconds(10)));
  EXPECT_TRUE(eventually([&] { return metric(0, "window.in_use_bytes") == 0; }));
}

TEST_F(AgentWindowTest, ManyLargeCallsBothWaysAllComplete) {
  start(3, &echo, tiny());
  std::vector<Future> calls;
  for (int number = 0; number < 90; ++number) {
    const worker_id_t from = number % 3;
    const auto to = static_cast<worker_id_t>((from + 1 + number % 2) % 3);
    calls.push_back(call(from, to, "", {tensorOf(400 * kKiB, number), tensorOf(300 * kKiB, number)}));
  }
  for (int number = 0; number < 90; ++number) {
    const c10::intrusive_ptr<Message> response = answer(calls[static_cast<size_t>(number)]);
    EXPECT_TRUE(isAll(response->tensors()[0], number));
    EXPECT_TRUE(isAll(response->tensors()[1], number));
  }
  for (worker_id_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(eventually([&] { return metric(rank, "window.in_use_bytes") == 0; }));
  }
}

} // namespace
} // namespace torch_ucx_rpc
