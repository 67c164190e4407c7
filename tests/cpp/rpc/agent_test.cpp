// Calls, their answers, and their waiting callers.

#include "agent_fixture.h"
#include "stalls.h"

namespace torch_ucx_rpc {
namespace {

TEST_F(AgentTest, CallIsAnswered) {
  start(2);
  const c10::intrusive_ptr<Message> response = answer(call(0, 1, "hello"));
  EXPECT_EQ(textOf(*response), "hello");
  EXPECT_EQ(response->type(), MessageType::PYTHON_RET);
}

TEST_F(AgentTest, TensorsOfAllKindsTravel) {
  start(2);
  const at::Tensor base = at::rand({300, 400});
  const std::vector<at::Tensor> sent = {
      at::scalar_tensor(1.5),
      at::empty({0, 3}),
      base.t(),
      base.narrow(0, 10, 20),
      at::rand({700, 900}), // by rendezvous
      at::rand({3}).set_requires_grad(true),
      base.to_sparse(),
      at::quantize_per_tensor(base, 0.1, 3, at::kQInt8),
      at::rand({10}, at::kComplexFloat).conj()};
  const c10::intrusive_ptr<Message> response = answer(call(0, 1, std::string(200'000, 'x'), sent));
  EXPECT_EQ(response->payload().size(), 200'000u);
  const std::vector<at::Tensor>& received = response->tensors();
  ASSERT_EQ(received.size(), sent.size());
  for (size_t index : {0u, 1u, 2u, 3u, 4u, 5u, 8u}) {
    EXPECT_TRUE(received[index].equal(sent[index])) << index;
    EXPECT_EQ(received[index].strides(), sent[index].strides());
    EXPECT_EQ(received[index].requires_grad(), sent[index].requires_grad());
  }
  EXPECT_TRUE(received[6].to_dense().equal(base));
  EXPECT_TRUE(received[7].dequantize().equal(sent[7].dequantize()));
  EXPECT_TRUE(received[2].is_alias_of(received[3])) << "views of one tensor still are";
}

// torch's Message::getStorages() throws for undefined tensors.
TEST_F(AgentTest, UndefinedTensorsTravel) {
  start(2, [](Message& request) {
    EXPECT_FALSE(request.tensors().at(0).defined());
    Future future = newFuture();
    future->markCompleted(
        makeMessage(MessageType::PYTHON_RET, "back", request.tensors()),
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>());
    return future;
  });
  const c10::intrusive_ptr<Message> response = answer(call(0, 1, "", {at::Tensor(), at::ones({2})}));
  EXPECT_FALSE(response->tensors().at(0).defined());
  EXPECT_TRUE(response->tensors().at(1).equal(at::ones({2})));
}

TEST_F(AgentTest, CallToOneselfGetsACopy) {
  start(1);
  const at::Tensor sent = tensorOf(kMiB);
  const c10::intrusive_ptr<Message> response = answer(call(0, 0, "me", {sent}));
  EXPECT_EQ(textOf(*response), "me");
  response->tensors()[0].fill_(9);
  EXPECT_TRUE(isAll(sent, 1));
}

TEST_F(AgentTest, HandlerMayAnswerLater) {
  Future later = newFuture();
  start(2, [&](Message& /*request*/) { return later; });
  const Future future = call(0, 1, "when?");
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.server_active_async_calls") == 1; }));
  EXPECT_FALSE(future->completed());
  complete(later, "now", {tensorOf(kMiB, 3)});
  EXPECT_EQ(textOf(*answer(future)), "now");
  EXPECT_EQ(metric(1, "agent.server_active_async_calls"), 0u);
}

TEST_F(AgentTest, ExceptionOfTheHandlerReachesTheCaller) {
  start(2, [](Message& /*request*/) -> Future { throw std::runtime_error("no such function"); });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "no such function"));
}

TEST_F(AgentTest, FailureOfTheHandlersFutureReachesTheCaller) {
  start(2, [](Message& /*request*/) {
    Future future = newFuture();
    future->setError(std::make_exception_ptr(std::runtime_error("it did not work out")));
    return future;
  });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "it did not work out"));
}

TEST_F(AgentTest, AnswerThatCannotBeSentBecomesAnError) {
  start(2, [](Message& /*request*/) { return completed("", {at::empty({3}, at::kMeta)}); });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "is on the meta device"));
}

TEST_F(AgentTest, RequestThatCannotBeSentIsRefusedAtOnce) {
  start(2);
  EXPECT_THROW((void)call(0, 1, "f", {at::empty({3}, at::kMeta)}), c10::Error);
  EXPECT_EQ(metric(0, "agent.client_active_calls"), 0u);
}

TEST_F(AgentTest, UnknownWorkersAreAnErrorThatNamesTheKnownOnes) {
  start(2);
  for (const auto& ask : std::vector<std::function<void()>>{
           [&] { (void)agent(0).getWorkerInfo("nobody"); }, [&] { (void)agent(0).getWorkerInfo(worker_id_t{7}); }}) {
    try {
      ask();
      ADD_FAILURE();
    } catch (const std::runtime_error& error) {
      EXPECT_TRUE(contains(error.what(), "w0 (rank 0), w1 (rank 1)")) << error.what();
    }
  }
}

TEST_F(AgentTest, ManyThreadsCallAllWorkers) {
  start(3);
  constexpr int kThreads = 6;
  constexpr int kEach = 200;
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int id = 0; id < kThreads; ++id) {
    callers.emplace_back([&, id] {
      const auto from = static_cast<worker_id_t>(id % 3);
      for (int number = 0; number < kEach; ++number) {
        const auto to = static_cast<worker_id_t>((id + number) % 3);
        const std::string text = std::to_string(id) + ":" + std::to_string(number);
        const uint64_t bytes = number % 10 == 0 ? 300 * kKiB : 100;
        const c10::intrusive_ptr<Message> response = answer(call(from, to, text, {tensorOf(bytes, number)}));
        right.fetch_add(textOf(*response) == text && isAll(response->tensors()[0], number) ? 1 : 0);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(right.load(), kThreads * kEach);
  EXPECT_EQ(
      metric(0, "agent.calls_sent") + metric(1, "agent.calls_sent") + metric(2, "agent.calls_sent"),
      static_cast<uint64_t>(kThreads * kEach));
  EXPECT_TRUE(eventually([&] { return metric(1, "window.in_use_bytes") == 0; }));
}

// The caller drives progress itself while it waits.
TEST_F(AgentTest, WaitersAreWokenForTheirAnswers) {
  start(2);
  const Stalls stalls;
  std::atomic<int> right{0};
  std::atomic<int64_t> slowestMs{0};
  std::vector<std::thread> callers;
  for (int id = 0; id < 4; ++id) {
    callers.emplace_back([&, id] {
      for (int number = 0; number < 1000; ++number) {
        const auto began = std::chrono::steady_clock::now();
        const Future future = call(id % 2, (id + 1) % 2, std::to_string(number));
        agent(id % 2).calls().waitDriving(*future);
        const auto took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - began).count();
        for (int64_t slowest = slowestMs.load(); took > slowest && !slowestMs.compare_exchange_weak(slowest, took);) {
        }
        right.fetch_add(future->completed() && textOf(*answer(future)) == std::to_string(number) ? 1 : 0);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(right.load(), 4000);
  EXPECT_LT(static_cast<double>(slowestMs.load()), 450 + 1000 * stalls.seconds())
      << "a lost wake-up shows as a sleep of its full bound, half a second";
}

// `gil` stands for Python's GIL. A waiting thread sometimes takes it to handle signals, and a thread that completes a
// future holds it.
TEST_F(AgentTest, CompleterOfAFutureMayHoldALockThatItsWaiterWants) {
  std::mutex gil;
  std::atomic<bool> wantsGil{false};
  whileWaiting_ = [&] {
    wantsGil.store(true);
    const std::lock_guard lock(gil);
  };
  start(1);
  const Future future = newFuture();
  std::unique_lock hasGil(gil);
  std::thread waiter([&] { agent(0).calls().waitIdle(*future); });
  EXPECT_TRUE(eventually([&] { return wantsGil.load(); }));
  complete(future, "done");
  hasGil.unlock();
  waiter.join();
  whileWaiting_ = {};
}

// An answer of torch's own bookkeeping wakes no thread: the thread that receives it completes the call. Completing
// other calls may run user code.
TEST_F(AgentTest, ReceiverOfABookkeepingAnswerCompletesTheCall) {
  std::mutex beforeCallback;
  start(2, [&](Message& request) {
    const std::lock_guard lock(beforeCallback);
    return echo(request);
  });
  const auto isCompletedByATask = [&](MessageType type) {
    std::atomic<bool> isInTask{false};
    std::atomic<bool> isCompleted{false};
    {
      const std::lock_guard lock(beforeCallback);
      agent(0)
          .send(agent(0).getWorkerInfo(1), makeMessage(type, "request"), rpc::kUnsetRpcTimeout, {})
          ->addCallback([&](JitFuture& /*future*/) {
            isInTask.store(Executor::isInTask());
            isCompleted.store(true);
          });
    }
    EXPECT_TRUE(eventually([&] { return isCompleted.load(); }));
    return isInTask.load();
  };
  EXPECT_TRUE(isCompletedByATask(MessageType::PYTHON_CALL));
  EXPECT_FALSE(isCompletedByATask(MessageType::RREF_CHILD_ACCEPT));
  EXPECT_FALSE(isCompletedByATask(MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ));
}

TEST_F(AgentTest, WaitersThatAreInterruptedStopWaiting) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  constexpr size_t kWaiters = 3; // one of them drives progress
  std::vector<Future> calls;
  for (size_t number = 0; number < kWaiters; ++number) {
    calls.push_back(call(0, 1, std::to_string(number)));
  }
  std::atomic<size_t> ended{0};
  std::vector<std::thread> waiters;
  for (const Future& future : calls) {
    waiters.emplace_back([&] {
      EXPECT_THROW(agent(0).calls().waitDriving(*future), Interrupted);
      ended.fetch_add(1);
    });
  }
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == kWaiters; }));
  isInterrupted_.store(true);
  EXPECT_TRUE(eventually([&] { return ended.load() == kWaiters; }, std::chrono::seconds(5)))
      << "only " << ended.load() << " waiters ask now and then whether to go on";
  gate_->open();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  for (size_t number = 0; number < kWaiters; ++number) {
    EXPECT_EQ(textOf(*answer(calls[number])), std::to_string(number)) << "the calls themselves go on";
  }
}

} // namespace
} // namespace torch_ucx_rpc
