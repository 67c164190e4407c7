#include "agent_fixture.h"

namespace torch_ucx_rpc {
namespace {

// ------------------------------------------------------------------------------------------------------------- calls

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

// torch's Message::getStorages() throws for them.
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

TEST_F(AgentTest, WhatTheHandlerThrowsReachesTheCaller) {
  start(2, [](Message& /*request*/) -> Future { throw std::runtime_error("no such function"); });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "no such function"));
}

TEST_F(AgentTest, WhatTheHandlersFutureFailsWithReachesTheCaller) {
  start(2, [](Message& /*request*/) {
    Future future = newFuture();
    future->setError(std::make_exception_ptr(std::runtime_error("it did not work out")));
    return future;
  });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "it did not work out"));
}

TEST_F(AgentTest, AnswerThatCannotBeSentBecomesAnError) {
  start(2, [](Message& /*request*/) { return completed("", {at::empty({3}, at::kMeta)}); });
  EXPECT_TRUE(contains(failure(call(0, 1, "f")), "CPU tensors"));
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

TEST_F(AgentTest, ManyThreadsCallEverybody) {
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
  std::atomic<int> right{0};
  std::atomic<int64_t> slowestMs{0};
  std::vector<std::thread> callers;
  for (int id = 0; id < 4; ++id) {
    callers.emplace_back([&, id] {
      for (int number = 0; number < 1000; ++number) {
        const auto began = std::chrono::steady_clock::now();
        const Future future = call(id % 2, (id + 1) % 2, std::to_string(number));
        agent(id % 2).wait(*future);
        const auto took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - began).count();
        slowestMs.store(std::max<int64_t>(slowestMs.load(), took));
        right.fetch_add(future->completed() && textOf(*answer(future)) == std::to_string(number) ? 1 : 0);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(right.load(), 4000);
  EXPECT_LT(slowestMs.load(), 450) << "a lost wake-up shows as a sleep of its full bound, half a second";
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
      EXPECT_THROW(agent(0).wait(*future), Interrupted);
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

TEST_F(AgentTest, WaiterThatLooksUpDoesNotBlockWhoCompletes) {
  // Looking up takes the GIL, and torch completes some futures with it.
  std::mutex gil;
  std::atomic<size_t> lookingUp{0};
  whileWaiting_ = [&] {
    lookingUp.fetch_add(1);
    const std::lock_guard lock(gil);
  };
  start(2);
  const Future future = newFuture();
  std::unique_lock lock(gil);
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) { // one of them drives progress
    waiters.emplace_back([&] { agent(0).wait(*future); });
  }
  EXPECT_TRUE(eventually([&] { return lookingUp.load() >= 2; }));
  std::atomic<bool> isCompleted{false};
  std::thread completer([&] {
    complete(future, "done");
    isCompleted.store(true);
  });
  EXPECT_TRUE(eventually([&] { return isCompleted.load(); }, std::chrono::seconds(5)));
  lock.unlock();
  completer.join();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  whileWaiting_ = [] {};
}

// ------------------------------------------------------------------------------------------------ timeouts and faults

TEST_F(AgentTest, LostRequestFailsAtItsDeadline) {
  start(3);
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.kind == wire::Kind::kRequest && header.sourceRank == 0 && header.callId == 0 ? Fate::kDrop
                                                                                               : Fate::kDeliver;
  });
  const auto began = std::chrono::steady_clock::now();
  const Future lost = call(0, 1, "lost", {}, 0.1f);
  const Future other = call(0, 2, "other", {}, 30.f);
  const std::string what = failure(lost);
  EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(100));
  EXPECT_TRUE(contains(what, "RPC ran for more than")) << what;
  EXPECT_TRUE(contains(what, "worker 'w1' (rank 1")) << what;
  EXPECT_EQ(rpc::getRPCErrorType(*lost), rpc::RPCErrorType::TIMEOUT);
  EXPECT_EQ(textOf(*answer(other)), "other");
  EXPECT_EQ(metric(0, "agent.calls_timed_out"), 1u);
  EXPECT_EQ(metric(0, "agent.client_active_calls"), 0u);
}

TEST_F(AgentTest, AgentsTimeoutHoldsWhereACallHasNone) {
  AgentOptions options;
  options.rpcTimeout = milliseconds(80);
  start(2, &echo, options);
  fault(wire::Kind::kResponse, 1, Fate::kDrop);
  EXPECT_TRUE(contains(failure(call(0, 1, "lost")), "(80 ms)"));
}

TEST_F(AgentTest, TimeoutZeroMeansNone) {
  AgentOptions options;
  options.rpcTimeout = milliseconds(20);
  start(
      2,
      [this](Message& request) {
        gate_->pass();
        return echo(request);
      },
      options);
  const Future endless = call(0, 1, "endless", {}, 0.f);
  const Future bounded = call(0, 1, "bounded");
  EXPECT_TRUE(contains(failure(bounded), "RPC ran for more than"));
  EXPECT_FALSE(endless->completed());
  gate_->open();
  EXPECT_EQ(textOf(*answer(endless)), "endless");
}

TEST_F(AgentTest, TimeoutsComeWhileEveryHandlerIsBlocked) {
  AgentOptions options;
  options.numWorkerThreads = 12;
  start(
      2,
      [this](Message& request) {
        gate_->pass();
        return echo(request);
      },
      options);
  fault(wire::Kind::kRequest, 0, Fate::kDrop);
  std::vector<Future> calls;
  for (size_t blocked = 1; blocked <= 12; ++blocked) {
    calls.push_back(call(1, 0, "blocks a handler of worker 0"));
    ASSERT_TRUE(eventually([&] { return gate_->waiting() == blocked; }));
    EXPECT_TRUE(contains(failure(call(0, 1, "never answered", {}, 0.02f)), "RPC ran for more than")) << blocked;
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(AgentTest, CallToOneselfIsServedWhileOtherHandlersAreBlocked) {
  AgentOptions options;
  options.numWorkerThreads = 12;
  start(
      2,
      [this](Message& request) {
        if (textOf(request) == "block") {
          gate_->pass();
        }
        return echo(request);
      },
      options);
  std::vector<Future> calls;
  for (size_t blocked = 1; blocked < 12; ++blocked) {
    calls.push_back(call(1, 0, "block"));
    ASSERT_TRUE(eventually([&] { return gate_->waiting() == blocked; }));
    ASSERT_EQ(textOf(*answer(call(0, 0, "self", {}, 5.f))), "self") << blocked << " handlers blocked";
  }
}

TEST_F(AgentTest, LateResponseIsDroppedAndItsMemoryGoesBack) {
  start(2);
  for (const uint64_t bytes : {uint64_t{100}, 4 * kMiB}) {
    fault(wire::Kind::kResponse, 1, Fate::kHold);
    EXPECT_TRUE(contains(failure(call(0, 1, "late", {tensorOf(bytes)}, 0.1f)), "RPC ran for more than"));
    network_.setFault({});
    network_.releaseHeld();
    EXPECT_EQ(textOf(*answer(call(0, 1, "next"))), "next");
    EXPECT_TRUE(eventually([&] { return poolBytesInUse() == poolBytesAtStart_; })) << bytes;
    EXPECT_EQ(metric(0, "window.in_use_bytes"), 0u);
    EXPECT_EQ(metric(0, "window.waiting_messages"), 0u);
  }
}

TEST_F(AgentTest, DoubledMessagesCompleteACallOnce) {
  start(2);
  network_.setFault([](const wire::Header& header, SendMode mode) {
    return mode == SendMode::kEager && header.spanCount == 0 ? Fate::kDuplicate : Fate::kDeliver;
  });
  for (int number = 0; number < 200; ++number) {
    const std::string text = std::to_string(number);
    EXPECT_EQ(textOf(*answer(call(0, 1, text))), text); // completing a future twice would throw
  }
}

TEST_F(AgentTest, DoubledPartsOfALargeMessageFailTheCallOrNot) {
  start(2);
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kDuplicate; });
  for (int number = 0; number < 20; ++number) {
    const Future future = call(0, 1, "large", {tensorOf(kMiB), tensorOf(kMiB)}, 10.f);
    ASSERT_TRUE(eventually([&] { return future->completed(); }));
    if (future->hasError()) {
      EXPECT_TRUE(contains(future->tryRetrieveErrorMessage(), "contradict")) << future->tryRetrieveErrorMessage();
    }
  }
}

TEST_F(AgentTest, PartsThatArriveInReverseAreJoined) {
  start(2);
  for (const wire::Kind kind : {wire::Kind::kRequest, wire::Kind::kResponse}) {
    network_.setFault([kind](const wire::Header& header, SendMode /*mode*/) {
      return header.kind == kind ? Fate::kHold : Fate::kDeliver;
    });
    std::vector<Future> calls;
    for (int number = 0; number < 5; ++number) {
      calls.push_back(call(0, 1, std::to_string(number), {tensorOf(200 * kKiB, number), tensorOf(kMiB, -number)}));
    }
    if (kind == wire::Kind::kResponse) {
      ASSERT_TRUE(eventually(
          [&] { return metric(1, "agent.calls_received") == 10 && metric(1, "agent.server_active_calls") == 0; }));
    }
    network_.setFault({});
    // A part may still be on its way to being held: repeated until all is there.
    ASSERT_TRUE(eventually([&] {
      network_.releaseHeld();
      return std::all_of(calls.begin(), calls.end(), [](const Future& future) { return future->completed(); });
    }));
    for (int number = 0; number < 5; ++number) {
      const c10::intrusive_ptr<Message> response = answer(calls[static_cast<size_t>(number)]);
      EXPECT_EQ(textOf(*response), std::to_string(number));
      EXPECT_TRUE(isAll(response->tensors()[0], number));
      EXPECT_TRUE(isAll(response->tensors()[1], -number));
    }
  }
}

TEST_F(AgentTest, SendThatFailsFailsItsCallAtOnceAndNamesThePeer) {
  start(2);
  fault(wire::Kind::kRequest, 0, Fate::kFail);
  const std::string what = failure(call(0, 1, "f", {}, 3600.f));
  EXPECT_TRUE(contains(what, "worker 'w1' (rank 1, pid 1001 on host)")) << what;
  EXPECT_TRUE(contains(what, "the send was made to fail")) << what;
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.kind == wire::Kind::kRequest && header.index == 0 ? Fate::kFail : Fate::kDeliver; // one span of it
  });
  EXPECT_TRUE(contains(failure(call(0, 1, "f", {tensorOf(kMiB)}, 3600.f)), "worker 'w1'"));
}

TEST_F(AgentTest, DeathOfAPeerFailsTheCallsToItAndNoOthers) {
  start(3, [this](Message& request) {
    if (textOf(request) == "block") {
      gate_->pass();
    }
    return echo(request);
  });
  std::vector<Future> doomed;
  for (int count = 0; count < 5; ++count) {
    doomed.push_back(call(0, 1, "block", {tensorOf(count % 2 == 0 ? 10 : 2 * kMiB)}, 3600.f));
  }
  const Future other = call(0, 2, "block", {}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 6; }));
  network_.kill("address 1");
  for (const Future& future : doomed) {
    const std::string what = failure(future);
    EXPECT_TRUE(contains(what, "worker 'w1' (rank 1")) << what;
    EXPECT_TRUE(contains(what, "has died")) << what;
  }
  EXPECT_TRUE(contains(failure(call(0, 1, "new", {}, 3600.f)), "worker 'w1'")) << "at once";
  EXPECT_FALSE(other->completed());
  gate_->open();
  EXPECT_EQ(textOf(*answer(other)), "block");
  EXPECT_EQ(textOf(*answer(call(2, 0, "ok"))), "ok");
}

TEST_F(AgentTest, DeathOfAPeerFreesWhatWasLentToItsCalls) {
  AgentOptions options;
  options.receiveWindowBytes = kMiB;
  start(
      2,
      [this](Message& request) {
        gate_->pass();
        return echo(request);
      },
      options);
  const Future first = call(0, 1, "fills the window", {tensorOf(kMiB)}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  at::Tensor tensor = tensorOf(4 * kMiB);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  const Future second = call(0, 1, "waits", {std::move(tensor)}, 3600.f);
  ASSERT_TRUE(eventually([&] { return metric(1, "window.waiting_messages") == 1; }));
  network_.kill("address 1");
  (void)failure(second);
  EXPECT_TRUE(eventually([&] { return storage.expired(); }));
}

AgentOptions shortHeartbeats() {
  AgentOptions options;
  options.heartbeatLimit = milliseconds(1000);
  options.numWorkerThreads = 1;
  return options;
}

TEST_F(AgentTest, PeerThatFallsSilentIsLostAndSoAreTheCallsToIt) {
  start(
      3,
      [this](Message& request) {
        if (textOf(request) == "block") {
          gate_->pass();
        }
        return echo(request);
      },
      shortHeartbeats());
  const Future pending = call(0, 1, "block");
  ASSERT_TRUE(eventually([this] { return gate_->waiting() == 1; }));
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.sourceRank == 1 ? Fate::kHold : Fate::kDeliver;
  });
  const std::string what = failure(pending);
  EXPECT_TRUE(contains(what, "lost worker 'w1' (rank 1")) << what;
  EXPECT_TRUE(contains(what, "no sign of life for")) << what;
  EXPECT_EQ(textOf(*answer(call(0, 2, "fine"))), "fine");
  // What it says later changes nothing.
  network_.setFault({});
  network_.releaseHeld();
  EXPECT_TRUE(contains(failure(call(0, 1, "again")), "lost worker 'w1'"));
}

TEST_F(AgentTest, PeerWhoseHandlersAllBlockGivesSignsOfLife) {
  start(
      2,
      [this](Message& request) {
        gate_->pass();
        return echo(request);
      },
      shortHeartbeats());
  const Future pending = call(0, 1, "block");
  ASSERT_TRUE(eventually([this] { return gate_->waiting() == 1; }));
  std::atomic<int> pongs{0};
  network_.setFault([&](const wire::Header& header, SendMode /*mode*/) {
    pongs.fetch_add(header.kind == wire::Kind::kPong && header.sourceRank == 1 ? 1 : 0);
    return Fate::kDeliver;
  });
  // More than the limit has room for.
  EXPECT_TRUE(eventually([&] { return pongs.load() > 20; })) << pongs.load();
  EXPECT_FALSE(pending->completed());
  gate_->open();
  EXPECT_EQ(textOf(*answer(pending)), "block");
  network_.setFault({});
}

TEST_F(AgentTest, PeerThatShutsDownSaysGoodbye) {
  start(3, [this](Message& request) {
    if (textOf(request) == "block") {
      gate_->pass();
    }
    return echo(request);
  });
  const Future pending = call(0, 1, "block", {}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  std::thread closer([&] { agent(1).shutdown(); }); // waits a while for its handler
  const std::string what = failure(pending);
  EXPECT_TRUE(contains(what, "worker 'w1' (rank 1")) << what;
  EXPECT_TRUE(contains(what, "has shut down")) << what;
  EXPECT_TRUE(contains(failure(call(0, 1, "new", {}, 3600.f)), "has shut down"));
  EXPECT_EQ(textOf(*answer(call(0, 2, "ok"))), "ok");
  gate_->open();
  closer.join();
}

TEST_F(AgentTest, CancelFreesTheSendersMemory) {
  AgentOptions options;
  options.receiveWindowBytes = kMiB;
  start(
      2,
      [this](Message& request) {
        if (textOf(request) == "block") {
          gate_->pass();
        }
        return echo(request);
      },
      options);
  // A request that waits for a thread keeps the window from being counted as stalled.
  std::vector<Future> blockers;
  for (int count = 0; count < 17; ++count) {
    blockers.push_back(
        call(0, 1, "block", count == 0 ? std::vector<at::Tensor>{tensorOf(kMiB)} : std::vector<at::Tensor>{}, 3600.f));
  }
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 16; }));
  at::Tensor tensor = tensorOf(4 * kMiB);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  const Future canceled = call(0, 1, "waits", {std::move(tensor)}, 0.3f);
  ASSERT_TRUE(eventually([&] { return metric(1, "window.waiting_messages") == 1; }));
  EXPECT_FALSE(storage.expired());
  EXPECT_TRUE(contains(failure(canceled), "RPC ran for more than"));
  EXPECT_TRUE(eventually([&] { return storage.expired(); })) << "a timed-out call pins its sender's memory";
  EXPECT_TRUE(eventually([&] { return metric(1, "window.waiting_messages") == 0; }));
  gate_->open();
  for (const Future& blocker : blockers) {
    EXPECT_EQ(textOf(*answer(blocker)), "block");
  }
  EXPECT_EQ(metric(1, "agent.calls_received"), 17u) << "the canceled one was never begun";
}

TEST_F(AgentTest, CancelFreesAMessageThatArrivedInPart) {
  start(2);
  network_.setFault([](const wire::Header& header, SendMode mode) {
    return header.kind == wire::Kind::kRequest && mode == SendMode::kEager ? Fate::kDrop : Fate::kDeliver; // no body
  });
  at::Tensor tensor = tensorOf(4 * kMiB);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  EXPECT_TRUE(contains(failure(call(0, 1, "f", {std::move(tensor)}, 0.1f)), "RPC ran for more than"));
  EXPECT_TRUE(eventually([&] { return storage.expired(); }));
}

// ---------------------------------------------------------------------------------------------------- receive window

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

TEST_F(AgentWindowTest, HandlerThatKeepsItsTensorsDoesNotStallIt) {
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

// Handlers that wait for one another without calling out: the window is stalled, and lets one more in after a while.
TEST_F(AgentWindowTest, StalledWindowLetsTheNextOneIn) {
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

// A callback of a future runs when its answer has come. It may call out and wait, as a handler may.
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

// --------------------------------------------------------------------------------------------------- barrier and join

// Runs one function for each of the ranks, at once.
void atOnce(const std::vector<worker_id_t>& ranks, const std::function<void(worker_id_t)>& function) {
  std::vector<std::thread> threads;
  for (const worker_id_t rank : ranks) {
    threads.emplace_back([&function, rank] { function(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(AgentTest, BarrierSumsOverAll) {
  start(4);
  atOnce({0, 1, 2, 3}, [&](worker_id_t rank) {
    for (int round = 0; round < 20; ++round) {
      EXPECT_EQ(agent(rank).barrier(rank + round, std::chrono::seconds(20)), 6 + 4 * round);
    }
  });
}

TEST_F(AgentTest, BarrierThatTimesOutNamesWhoIsMissing) {
  start(3);
  std::string what;
  atOnce({0, 2}, [&](worker_id_t rank) {
    try {
      (void)agent(rank).barrier(0, milliseconds(rank == 0 ? 600 : 20'000));
      ADD_FAILURE();
    } catch (const std::exception& error) {
      if (rank == 0) {
        what = error.what();
        agent(2).shutdown();
      } else {
        EXPECT_TRUE(contains(error.what(), "was shut down")) << error.what();
      }
    }
  });
  EXPECT_TRUE(contains(what, "missing: worker 'w1' (rank 1")) << what;
  EXPECT_FALSE(contains(what, "'w2'")) << what;
}

TEST_F(AgentTest, BarrierEndsWhenAWorkerDies) {
  start(3);
  atOnce({0, 1, 2}, [&](worker_id_t rank) {
    if (rank == 1) {
      (void)answer(call(1, 0, "known to both"));
      (void)answer(call(2, 1, "known to both"));
      (void)answer(call(0, 1, "known to both"));
      network_.kill("address 1");
      return;
    }
    try {
      (void)agent(rank).barrier(0, std::chrono::seconds(20));
      ADD_FAILURE() << "rank " << rank;
    } catch (const std::exception& error) {
      EXPECT_TRUE(contains(error.what(), "worker 'w1'")) << error.what();
    }
  });
}

TEST_F(AgentTest, JoinWaitsForCallsInFlight) {
  start(3, [this](Message& request) {
    if (textOf(request) == "block") {
      gate_->pass();
    }
    return echo(request);
  });
  const Future open = call(2, 1, "block");
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  std::atomic<int> joined{0};
  std::thread joiners([&] {
    atOnce({0, 1, 2}, [&](worker_id_t rank) {
      agent(rank).join(true, 20.f);
      EXPECT_TRUE(open->completed()) << rank;
      joined.fetch_add(1);
    });
  });
  EXPECT_EQ(textOf(*answer(call(0, 1, "still served"))), "still served");
  EXPECT_EQ(joined.load(), 0);
  gate_->open();
  joiners.join();
  EXPECT_EQ(joined.load(), 3);
}

TEST_F(AgentTest, JoinFollowsChainsOfCalls) {
  start(3, [this](Message& request) { // passes a token on without waiting, as RREF messages do
    const std::string text = textOf(request);
    const int left = std::stoi(text);
    if (left > 0) {
      (void)call(
          static_cast<worker_id_t>(left % 3), static_cast<worker_id_t>((left + 2) % 3), std::to_string(left - 1));
    }
    return completed(text);
  });
  for (worker_id_t rank = 0; rank < 3; ++rank) {
    // Handler of `left` runs at rank (left + 1 + 2) % 3 == left % 3.
    (void)call(rank, 0, "30");
  }
  atOnce({0, 1, 2}, [&](worker_id_t rank) { agent(rank).join(true, 20.f); });
  EXPECT_EQ(
      metric(0, "agent.calls_received") + metric(1, "agent.calls_received") + metric(2, "agent.calls_received"), 93u);
}

TEST_F(AgentTest, GracefulEndIsSilent) {
  start(3);
  for (worker_id_t from = 0; from < 3; ++from) {
    for (worker_id_t to = 0; to < 3; ++to) {
      (void)answer(call(from, to, "hello"));
    }
  }
  atOnce({0, 1, 2}, [&](worker_id_t rank) {
    agent(rank).join(true, 20.f);
    agent(rank).shutdown();
  });
}

// ---------------------------------------------------------------------------------------------------------- shutdown

TEST_F(AgentTest, ShutdownFailsOpenCallsAndIsIdempotent) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future small = call(0, 1, "a", {}, 3600.f);
  const Future large = call(0, 1, "b", {tensorOf(4 * kMiB)}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 2; }));
  agent(0).shutdown();
  EXPECT_TRUE(contains(failure(small), "shut down on worker 'w0'"));
  EXPECT_TRUE(contains(failure(large), "shut down on worker 'w0'"));
  agent(0).shutdown();
  EXPECT_THROW((void)call(0, 1, "c"), std::exception);
}

TEST_F(AgentTest, ShutdownEndsAWaitingCaller) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future future = call(0, 1, "a", {}, 3600.f);
  std::thread waiter([&] { agent(0).wait(*future); });
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  agent(0).shutdown();
  waiter.join();
  EXPECT_TRUE(future->hasError());
}

TEST_F(AgentTest, ShutdownLeavesAHandlerThatIsStuckBehind) {
  start(2, [this](Message& request) {
    gate_->pass();
    return echo(request);
  });
  const Future future = call(0, 1, "a");
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  agent(1).shutdown();
  const std::weak_ptr<UcxRpcAgent> stuck = agents_.at(1);
  agents_.erase(1);
  EXPECT_FALSE(stuck.expired()) << "it lives as long as its handler";
  gate_->open();
  EXPECT_TRUE(eventually([&] { return stuck.expired(); }));
}

TEST_F(AgentTest, AgentDroppedWithoutShutdownEndsInOrder) {
  start(2);
  EXPECT_EQ(textOf(*answer(call(0, 1, "a"))), "a");
  agents_.erase(0);
  EXPECT_TRUE(eventually([&] {
    try {
      return contains(failure(call(1, 0, "b", {}, 3600.f)), "w0");
    } catch (const std::exception&) {
      return false;
    }
  }));
}

TEST_F(AgentTest, CallsUnderWayFromManyThreadsEndWithShutdown) {
  start(3);
  std::atomic<bool> isOver{false};
  std::atomic<int> unfinished{0};
  std::vector<std::thread> callers;
  for (int id = 0; id < 4; ++id) {
    callers.emplace_back([&, id] {
      const worker_id_t from = id % 3;
      while (!isOver.load()) {
        try {
          const Future future =
              call(from, static_cast<worker_id_t>((from + 1) % 3), "x", {tensorOf(id % 2 == 0 ? 10 : 100 * kKiB)});
          if (!eventually([&] { return future->completed(); })) {
            unfinished.fetch_add(1);
          }
        } catch (const std::exception&) {
          return; // it has shut down
        }
      }
    });
  }
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.calls_received") > 200; }));
  for (worker_id_t rank = 0; rank < 3; ++rank) {
    agent(rank).shutdown();
  }
  isOver.store(true);
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(unfinished.load(), 0);
}

// --------------------------------------------------------------------------------------- frames that should not come

// A bare transport that takes part as worker 9 or as nobody, and sends frames of its own making.
class AgentIntruderTest : public AgentTest, public TransportListener {
 protected:
  static constexpr worker_id_t kRank = 9;
  static constexpr uint64_t kSession = 4711;

  void SetUp() override {
    AgentTest::SetUp();
    start(2, [this](Message& request) {
      if (textOf(request) == "block") {
        gate_->pass();
      }
      return echo(request);
    });
    transport_ = network_.makeTransport("intruder");
    transport_->setListener(this);
    ASSERT_FALSE(transport_->connect("address 0", toZero_));
  }
  void TearDown() override {
    AgentTest::TearDown();
    transport_.reset();
  }
  void becomeMember() {
    agent(0).addMembers({memberOf(kRank, kSession, "intruder")});
  }

  void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) override {
    wire::Header read;
    EXPECT_FALSE(wire::readHeader(header, read));
    replies_.emplace_back(read, Bytes(bytes));
  }
  void onParked(std::span<const std::byte> /*header*/, void* parked, uint64_t /*bytes*/) override {
    transport_->refuse(parked);
  }
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  wire::Header frame(wire::Kind kind, uint64_t callId) {
    wire::Header header;
    header.kind = kind;
    header.sourceRank = kRank;
    header.sourceSession = kSession;
    header.targetSession = agent(0).session();
    header.callId = callId;
    return header;
  }
  const Outcome& send(const wire::Header& header, Bytes bytes, SendMode mode = SendMode::kEager) {
    headers_.push_back(header);
    bytes_.push_back(std::move(bytes));
    Outcome& outcome = outcomes_.emplace_back();
    transport_->send(toZero_, headers_.back(), bytes_.back(), mode, outcome.callback());
    return outcome;
  }
  [[nodiscard]] bool areAllSent() const {
    return std::all_of(outcomes_.begin(), outcomes_.end(), [](const Outcome& each) { return each.isDone(); });
  }
  [[nodiscard]] bool progressUntil(const std::function<bool()>& condition) {
    return eventually([&] {
      transport_->progress();
      return condition();
    });
  }

  // Lent to the transport, which comes after them.
  std::deque<wire::Header> headers_;
  std::deque<Bytes> bytes_;
  std::deque<Outcome> outcomes_;
  std::unique_ptr<Transport> transport_;
  EndpointId toZero_ = 0;
  std::vector<std::pair<wire::Header, Bytes>> replies_;
};

TEST_F(AgentIntruderTest, FramesFromStrangersAreRefusedAndCounted) {
  const auto body = [] { return wire::BodyWriter(MessageType::PYTHON_CALL).finish(); };
  send(frame(wire::Kind::kRequest, 1), body());
  send(frame(wire::Kind::kRequest, 2), body(), SendMode::kRendezvous);
  send(frame(wire::Kind::kGoodbye, 3), {});
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 3; }));
  EXPECT_TRUE(progressUntil([&] { return areAllSent(); })) << "what a stranger parked is refused";
  becomeMember();
  wire::Header forEarlierLife = frame(wire::Kind::kRequest, 4);
  forEarlierLife.targetSession ^= 1;
  send(forEarlierLife, body());
  ASSERT_TRUE(eventually([&] { return metric(0, "agent.frames_refused") == 4; }));
  EXPECT_EQ(metric(0, "agent.calls_received"), 0u);
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, MalformedRequestIsAnsweredWithAnError) {
  becomeMember();
  Bytes garbage(100);
  std::memset(garbage.data(), 0xA5, garbage.size());
  send(frame(wire::Kind::kRequest, 1), std::move(garbage));
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty(); }));
  EXPECT_EQ(replies_[0].first.kind, wire::Kind::kResponse);
  EXPECT_EQ(replies_[0].first.callId, 1u);
  wire::BodyView view;
  ASSERT_FALSE(wire::readBody(replies_[0].second, {}, view));
  EXPECT_EQ(view.messageType, static_cast<uint32_t>(MessageType::EXCEPTION));
  EXPECT_TRUE(contains({reinterpret_cast<const char*>(view.payload.data()), view.payload.size()}, "malformed message"));
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, AnswerOfAnotherWorkerThanTheOneCalledIsIgnored) {
  becomeMember();
  const Future future = call(0, 1, "block"); // the first call of worker 0: id 0
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  wire::BodyWriter forged(MessageType::PYTHON_RET);
  const std::string text = "forged";
  forged.setInlinePayload(text);
  send(frame(wire::Kind::kResponse, 0), forged.finish());
  EXPECT_EQ(textOf(*answer(call(0, 1, "later"))), "later"); // by then it has been looked at
  EXPECT_FALSE(future->completed()) << "answered by a worker that was not asked";
  gate_->open();
  EXPECT_EQ(textOf(*answer(future)), "block");
}

TEST_F(AgentIntruderTest, EmptyRendezvousIsSettled) {
  becomeMember();
  send(frame(wire::Kind::kRequest, 1), {}, SendMode::kRendezvous);
  EXPECT_TRUE(progressUntil([&] { return areAllSent(); })) << "parked for ever";
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
}

TEST_F(AgentIntruderTest, RequestOfContradictingPartsIsAnsweredAndGivesItsMemoryBack) {
  becomeMember();
  wire::Header header = frame(wire::Kind::kRequest, 1);
  header.spanCount = 3;
  header.index = 0;
  send(header, Bytes(500'000), SendMode::kRendezvous);
  header.index = 1;
  send(header, Bytes(500'000), SendMode::kRendezvous);
  header.index = 0;
  send(header, Bytes(500'000), SendMode::kRendezvous); // doubled
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty() && areAllSent(); }));
  EXPECT_EQ(replies_[0].first.callId, 1u);
}

TEST_F(AgentIntruderTest, SpansOfWrongSizesAreAnError) {
  becomeMember();
  wire::BodyWriter writer(MessageType::PYTHON_CALL);
  writer.setPayloadSpan(1'000'000, 0);
  wire::Header header = frame(wire::Kind::kRequest, 1);
  header.spanCount = 1;
  send(header, writer.finish());
  header.index = 0;
  send(header, Bytes(500'000), SendMode::kRendezvous); // half of what the body says
  ASSERT_TRUE(progressUntil([&] { return !replies_.empty() && areAllSent(); }));
  wire::BodyView view;
  ASSERT_FALSE(wire::readBody(replies_[0].second, {}, view));
  EXPECT_EQ(view.messageType, static_cast<uint32_t>(MessageType::EXCEPTION));
  EXPECT_TRUE(eventually([&] { return metric(0, "window.in_use_bytes") == 0; }));
}

} // namespace
} // namespace torch_ucx_rpc
