// Deadlines; lost, doubled and late messages; silent and dead peers; abandoned calls.

#include "agent_fixture.h"
#include "value_of.h"

namespace torch_ucx_rpc {
namespace {

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

TEST_F(AgentTest, CallWithoutATimeoutHasTheAgentsTimeout) {
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

TEST_F(AgentTest, CallsTimeOutWhileEveryHandlerIsBlocked) {
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
  start(2, echoBehindGate(), options);
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

TEST_F(AgentTest, DoubledPartsGiveTheRightAnswerOrAnErrorThatSaysSo) {
  start(2);
  network_.setFault([](const wire::Header& /*header*/, SendMode /*mode*/) { return Fate::kDuplicate; });
  for (int number = 0; number < 20; ++number) {
    const std::vector<at::Tensor> sent{tensorOf(kMiB, number), tensorOf(kMiB, -number)};
    const Future future = call(0, 1, "large", sent, 10.f);
    ASSERT_TRUE(eventually([&] { return future->completed(); }));
    if (future->hasError()) {
      EXPECT_TRUE(contains(future->tryRetrieveErrorMessage(), "contradict")) << future->tryRetrieveErrorMessage();
    } else {
      const auto response = answer(future);
      const std::vector<at::Tensor>& received = response->tensors();
      ASSERT_EQ(received.size(), 2u);
      EXPECT_TRUE(received[0].equal(sent[0]) && received[1].equal(sent[1])) << number;
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
    // A part may not have been held yet, so this repeats until all calls are completed.
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

TEST_F(AgentTest, FailedSendFailsItsCallAtOnceAndNamesThePeer) {
  start(2);
  fault(wire::Kind::kRequest, 0, Fate::kFail);
  const std::string what = failure(call(0, 1, "f", {}, 3600.f));
  EXPECT_TRUE(contains(what, "worker 'w1' (rank 1, pid 1001 on host)")) << what;
  EXPECT_TRUE(contains(what, "the send was made to fail")) << what;
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.kind == wire::Kind::kRequest && header.index == 0 ? Fate::kFail : Fate::kDeliver; // one span
  });
  EXPECT_TRUE(contains(failure(call(0, 1, "f", {tensorOf(kMiB)}, 3600.f)), "worker 'w1'"));
}

TEST_F(AgentTest, MessageWithATensorThatCannotBeSentEndsOnBothSides) {
  start(2);
  for (const wire::Kind kind : {wire::Kind::kRequest, wire::Kind::kResponse}) {
    network_.setFault([kind](const wire::Header& header, SendMode mode) {
      return header.kind == kind && mode == SendMode::kRendezvous && header.index == 1 ? Fate::kFail : Fate::kDeliver;
    });
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    Future future;
    {
      const std::vector<at::Tensor> tensors{tensorOf(kMiB, 1), tensorOf(kMiB, 2), tensorOf(kMiB, 3)};
      for (const at::Tensor& tensor : tensors) {
        storages.emplace_back(tensor.storage().getWeakStorageImpl());
      }
      future = call(0, 1, "f", tensors, 3600.f);
    }
    const std::string what = failure(future);
    EXPECT_TRUE(contains(what, "the send was made to fail")) << what;
    for (const auto& storage : storages) {
      EXPECT_TRUE(eventually([&] { return storage.expired(); })) << "a tensor is still held";
    }
    network_.setFault({});
    const std::vector<at::Tensor> sent{tensorOf(kMiB, 4)};
    EXPECT_TRUE(answer(call(0, 1, "f", sent))->tensors()[0].equal(sent[0]));
  }
}

TEST_F(AgentTest, DeathOfAPeerFailsTheCallsToItAndNoOthers) {
  start(3, echoBehindGate());
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

TEST_F(AgentTest, DeathOfAPeerFreesTensorsLentToItsCalls) {
  AgentOptions options;
  options.receiveWindowBytes = kMiB;
  options.numWorkerThreads = 1;
  start(
      2,
      [this](Message& request) {
        gate_->pass();
        return echo(request);
      },
      options);
  const Future first = call(0, 1, "fills the window", {tensorOf(kMiB)}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  // A request that waits for a thread keeps the window from being counted as stalled.
  const Future queued = call(0, 1, "waits for a thread", {}, 3600.f);
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

TEST_F(AgentTest, SilentPeerIsLostAndCallsToItFail) {
  start(3, echoBehindGate(), shortHeartbeats());
  const Future pending = call(0, 1, "block");
  ASSERT_TRUE(eventually([this] { return gate_->waiting() == 1; }));
  network_.setFault([](const wire::Header& header, SendMode /*mode*/) {
    return header.sourceRank == 1 ? Fate::kHold : Fate::kDeliver;
  });
  const std::string what = failure(pending);
  EXPECT_TRUE(contains(what, "lost worker 'w1' (rank 1")) << what;
  EXPECT_TRUE(contains(what, "no sign of life for")) << what;
  EXPECT_EQ(textOf(*answer(call(0, 2, "fine"))), "fine");
  // Later messages of the lost peer change nothing.
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
  // Wait for more pongs than fit into the limit.
  EXPECT_TRUE(eventually([&] { return pongs.load() > 20; })) << pongs.load();
  EXPECT_FALSE(pending->completed());
  gate_->open();
  EXPECT_EQ(textOf(*answer(pending)), "block");
  network_.setFault({});
}

TEST_F(AgentTest, PeerThatShutsDownSaysGoodbye) {
  start(3, echoBehindGate());
  const Future pending = call(0, 1, "block", {}, 3600.f);
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  std::thread closer([&] { agent(1).shutdown(); }); // shutdown() waits a while for the handler
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
  start(2, echoBehindGate(), options);
  // A request that waits for a thread keeps the window from being counted as stalled.
  std::vector<Future> blockers;
  for (int count = 0; count < 17; ++count) {
    blockers.push_back(
        call(0, 1, "block", count == 0 ? std::vector<at::Tensor>{tensorOf(kMiB)} : std::vector<at::Tensor>{}, 3600.f));
  }
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 16; }));
  at::Tensor tensor = tensorOf(4 * kMiB);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  const Future canceled = call(0, 1, "waits", {std::move(tensor)}, 3.f);
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
    return header.kind == wire::Kind::kRequest && mode == SendMode::kEager ? Fate::kDrop : Fate::kDeliver; // lost
  });
  at::Tensor tensor = tensorOf(4 * kMiB);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  EXPECT_TRUE(contains(failure(call(0, 1, "f", {std::move(tensor)}, 0.1f)), "RPC ran for more than"));
  EXPECT_TRUE(eventually([&] { return storage.expired(); }));
}

// -------------------------------------------------------------------------------------------------------- the outbox

TEST_F(AgentTest, LargeMessagesBeyondTheLimitWaitAtTheirSender) {
  constexpr size_t kMore = 10;
  start(2);
  std::atomic<size_t> announced{0};
  network_.setFault([&](const wire::Header& header, SendMode mode) {
    const bool isSpan = header.kind == wire::Kind::kRequest && mode == SendMode::kRendezvous;
    announced += isSpan ? 1 : 0;
    return isSpan ? Fate::kDrop : Fate::kDeliver; // spans are announced and never fetched
  });
  std::vector<Future> calls;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (size_t count = 0; count < PushShare::kMaxParts + kMore; ++count) {
    at::Tensor tensor = tensorOf(64 * kKiB);
    storages.push_back(tensor.storage().getWeakStorageImpl());
    calls.push_back(call(0, 1, "large", {std::move(tensor)}, 0.5f));
  }
  EXPECT_EQ(textOf(*answer(call(0, 1, "small"))), "small") << "it does not wait behind them";
  for (const Future& call : calls) {
    EXPECT_TRUE(contains(failure(call), "RPC ran for more than"));
  }
  EXPECT_EQ(announced.load(), PushShare::kMaxParts);
  EXPECT_TRUE(eventually([&] {
    return std::all_of(storages.end() - kMore, storages.end(), [](const auto& storage) { return storage.expired(); });
  })) << "the memory of unsent messages is free";
  network_.setFault({}); // the fault refers to this function's variables
}

TEST_F(AgentTest, LargeMessagesThatWaitForTheirTurnFailWithTheirReceiver) {
  start(2);
  fault(wire::Kind::kRequest, 0, Fate::kDrop);
  std::vector<Future> calls;
  for (size_t count = 0; count < 2 * PushShare::kMaxParts; ++count) {
    calls.push_back(call(0, 1, "large", {tensorOf(64 * kKiB)}, 3600.f));
  }
  network_.kill("address 1");
  for (const Future& call : calls) {
    const std::string what = failure(call);
    EXPECT_TRUE(contains(what, "worker 'w1'")) << what; // it is lost, or the message could not be sent
  }
  EXPECT_TRUE(eventually([&] { return valueOf(agent(0).reports().statistics().counts, "messages_sending") == 0; }));
}

TEST_F(AgentTest, AllLargeMessagesGetTheirTurn) {
  start(2);
  std::vector<Future> calls;
  for (size_t count = 0; count < 5 * PushShare::kMaxParts; ++count) {
    calls.push_back(call(
        static_cast<worker_id_t>(count % 2),
        static_cast<worker_id_t>(1 - count % 2),
        "large",
        {tensorOf(64 * kKiB, static_cast<double>(count))}));
  }
  for (size_t count = 0; count < calls.size(); ++count) {
    EXPECT_TRUE(isAll(answer(calls[count])->tensors()[0], static_cast<double>(count)));
  }
}

// One message may have more parts than may be in flight.
TEST_F(AgentTest, MessageWithMorePartsThanTheLimitIsSentByItself) {
  start(2);
  std::vector<at::Tensor> sent;
  for (size_t count = 0; count < PushShare::kMaxParts + 1; ++count) {
    sent.push_back(tensorOf(64 * kKiB, static_cast<double>(count)));
  }
  const Future first = call(0, 1, "first", sent);
  const Future second = call(0, 1, "second", sent);
  for (const Future& future : {first, second}) {
    const c10::intrusive_ptr<Message> received = answer(future);
    ASSERT_EQ(received->tensors().size(), sent.size());
    EXPECT_TRUE(isAll(received->tensors().back(), PushShare::kMaxParts));
  }
}

TEST_F(AgentTest, RequestWhoseCallerHasGivenUpIsNotRun) {
  AgentOptions options;
  options.numWorkerThreads = 1;
  std::atomic<int> handled{0};
  start(
      2,
      [&](Message& request) {
        handled.fetch_add(textOf(request) == "given up" ? 1 : 0);
        if (textOf(request) == "block") {
          gate_->pass();
        }
        return echo(request);
      },
      options);
  const Future blocking = call(0, 1, "block");
  ASSERT_TRUE(eventually([&] { return gate_->waiting() == 1; }));
  const Future givenUp = call(0, 1, "given up", {}, 0.05F);
  const Future patient = call(0, 1, "patient");
  // The callee counts the timeout from the arrival of the request, so the call ends later there.
  EXPECT_TRUE(contains(failure(givenUp), "RPC ran for more than"));
  ASSERT_TRUE(eventually([&] { return metric(1, "agent.calls_received") >= 3; }));
  EXPECT_TRUE(contains(failure(call(0, 1, "a clock", {}, 0.5F)), "RPC ran for more than"));
  gate_->open();
  EXPECT_EQ(textOf(*answer(blocking)), "block");
  EXPECT_EQ(textOf(*answer(patient)), "patient");
  EXPECT_EQ(handled.load(), 0);
  EXPECT_GE(metric(1, "agent.requests_expired"), 1u);
  EXPECT_TRUE(eventually([&] { return metric(1, "agent.server_active_calls") == 0; }));
}

} // namespace
} // namespace torch_ucx_rpc
