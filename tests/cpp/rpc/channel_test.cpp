// Values of channels between agents over a loopback network: arrivals, late values, too many values, values of other
// epochs, and dead senders.

#include "rpc/channel.h"
#include "agent_fixture.h"
#include "sealed_job.h"

#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>

namespace torch_ucx_rpc {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr milliseconds kPatienceMs(20000);

class ChannelTest : public SealedAgentTest {
 protected:
  std::vector<Member> asToldTo(worker_id_t rank, std::vector<Member> members) override {
    return hasSecret_ ? SealedAgentTest::asToldTo(rank, std::move(members)) : members;
  }
  void startInEpoch(worker_id_t size, uint64_t epoch = 0) {
    start(size);
    for (worker_id_t rank = 0; rank < size; ++rank) {
      channel(rank).advance("g", epoch);
    }
  }

  Channel& channel(worker_id_t rank) {
    return agent(rank).channel();
  }
  Peer& peer(worker_id_t of, worker_id_t rank) {
    return agent(of).group().peer("w" + std::to_string(rank));
  }
  std::shared_ptr<Channel::Sent> put(
      worker_id_t from, worker_id_t to, const std::string& tag, std::vector<at::Tensor> tensors, uint64_t epoch = 0) {
    return channel(from).put(peer(from, to), {"g", epoch, tag}, {std::move(tensors), false}, kPatienceMs);
  }
  std::shared_ptr<Channel::Expected> post(
      worker_id_t at,
      worker_id_t from,
      const std::string& tag,
      std::optional<std::vector<at::Tensor>> into = {},
      uint64_t epoch = 0) {
    return channel(at).post(peer(at, from), {"g", epoch, tag}, std::move(into));
  }
  std::vector<at::Tensor> take(worker_id_t at, worker_id_t from, const std::string& tag, uint64_t epoch = 0) {
    return channel(at).wait(post(at, from, tag, {}, epoch), kPatienceMs).tensors;
  }
  std::string failureOf(worker_id_t at, const std::shared_ptr<Channel::Expected>& expected, milliseconds timeout) {
    try {
      (void)channel(at).wait(expected, timeout);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  // Returns the announcement of 1 MiB to worker 1. The caller decides when it arrives.
  IncomingMessage largeValue(std::string_view tag) {
    wire::BodyWriter writer(0);
    wire::TensorRecord record{};
    record.layout = wire::Layout::kStrided;
    record.dtype = static_cast<uint8_t>(at::kByte);
    record.itemBytes = 1;
    record.storage = writer.addSpanStorage(kMiB, 0, 0, 0);
    const int64_t size = kMiB;
    const int64_t stride = 1;
    writer.addTensor(record, std::span(&size, 1), std::span(&stride, 1), false);
    IncomingMessage message;
    message.eagerBody = writer.finish();
    wire::appendPutName(message.eagerBody, {"g", 0, tag, 0});
    message.from = &peer(1, 0);
    message.header.kind = wire::Kind::kPut;
    message.header.callId = 1000;
    message.header.spanCount = 1;
    return message;
  }

  // Announces 1 MiB under "x" to worker 1, which has posted a tensor. onPut() of the result then lets the value arrive.
  IncomingMessage announceForPosted() {
    IncomingMessage message = largeValue("x");
    const uint64_t bytes = kMiB;
    Channel::Verdict verdict =
        channel(1).onPutAnnounced(*message.from, message.header, message.eagerBody, std::span(&bytes, 1));
    EXPECT_EQ(verdict.into.size(), 1u);
    message.spans.push_back({std::move(verdict.into.at(0)), bytes});
    return message;
  }

  bool hasSecret_ = false; // every frame is sealed
};

const std::vector<std::vector<at::Tensor>>& valuesOfAllSizes() {
  static const std::vector<std::vector<at::Tensor>> values = [] {
    std::vector<at::Tensor> many;
    for (int index = 0; index < 60; ++index) {
      many.push_back(at::full({2000}, index)); // small tensors, too many to fit into the body
    }
    return std::vector<std::vector<at::Tensor>>{
        {}, {at::ones({3})}, {at::ones({kMiB})}, {at::arange(9 * kMiB), at::ones({1})}, many};
  }();
  return values;
}

TEST_F(ChannelTest, ValuesOfAllSizesArrive) {
  startInEpoch(2);
  for (const bool isPosted : {false, true}) {
    for (size_t index = 0; index < valuesOfAllSizes().size(); ++index) {
      const std::vector<at::Tensor>& value = valuesOfAllSizes()[index];
      const std::string tag = std::to_string(index);
      const auto expected = isPosted ? post(1, 0, tag) : nullptr;
      const auto sent = put(0, 1, tag, value);
      const std::vector<at::Tensor> got = isPosted ? channel(1).wait(expected, kPatienceMs).tensors : take(1, 0, tag);
      ASSERT_EQ(got.size(), value.size());
      for (size_t one = 0; one < got.size(); ++one) {
        EXPECT_TRUE(got[one].equal(value[one])) << index << " " << one;
      }
      channel(0).wait(sent);
    }
  }
}

TEST_F(ChannelTest, SealedValuesOfAllSizesArrive) {
  hasSecret_ = true;
  startInEpoch(2);
  for (const std::vector<at::Tensor>& value : valuesOfAllSizes()) {
    put(0, 1, "x", value);
    const std::vector<at::Tensor> got = take(1, 0, "x");
    ASSERT_EQ(got.size(), value.size());
    for (size_t one = 0; one < got.size(); ++one) {
      EXPECT_TRUE(got[one].equal(value[one]));
    }
  }
}

TEST_F(ChannelTest, LargeValuesGoStraightIntoPostedTensors) {
  startInEpoch(2);
  const uint64_t inUse = poolBytesInUse();
  const at::Tensor into = at::zeros({4 * kMiB}, at::kByte);
  const auto expected = post(1, 0, "x", std::vector<at::Tensor>{into});
  channel(0).wait(put(0, 1, "x", {at::ones({4 * kMiB}, at::kByte)}));
  EXPECT_EQ(poolBytesInUse(), inUse); // the value has arrived, outside of the pool
  const Channel::Value value = channel(1).wait(expected, kPatienceMs);
  EXPECT_TRUE(into.equal(at::ones({4 * kMiB}, at::kByte)));
  EXPECT_EQ(value.tensors.front().const_data_ptr(), into.const_data_ptr());
}

TEST_F(ChannelTest, ValuesOfAnotherLayoutAreCopiedIntoPostedTensors) {
  startInEpoch(2);
  const at::Tensor value = at::arange(kMiB).reshape({1024, 1024});
  const at::Tensor into = at::zeros({1024, 1024}, at::kLong);
  put(0, 1, "x", {value.t()});
  (void)channel(1).wait(post(1, 0, "x", std::vector<at::Tensor>{into}), kPatienceMs);
  EXPECT_TRUE(into.equal(value.t()));
  const at::Tensor strided = at::zeros({1024, 2048}, at::kLong).slice(1, 0, 2048, 2);
  put(0, 1, "x", {value});
  (void)channel(1).wait(post(1, 0, "x", std::vector<at::Tensor>{strided}), kPatienceMs);
  EXPECT_TRUE(strided.equal(value));
  const at::Tensor conjugate = at::zeros({kMiB}, at::kComplexFloat).conj();
  const at::Tensor waves = at::randn({kMiB}, at::kComplexFloat);
  const auto expected = post(1, 0, "x", std::vector<at::Tensor>{conjugate});
  put(0, 1, "x", {waves});
  (void)channel(1).wait(expected, kPatienceMs);
  EXPECT_TRUE(conjugate.equal(waves));
}

TEST_F(ChannelTest, ValuesThatAreNotTakenWaitAtTheirSender) {
  startInEpoch(2);
  const at::Tensor large = at::ones({40 * kMiB}, at::kByte);
  const auto first = put(0, 1, "0", {large});
  channel(0).wait(first);
  const auto second = put(0, 1, "1", {large});
  const auto third = put(0, 1, "2", {large});
  put(0, 1, "small", {at::ones({1})});
  EXPECT_EQ(take(1, 0, "small").size(), 1u); // the small value passes the large ones
  EXPECT_EQ(channel(1).counts().untakenBytes, 40u * kMiB);
  EXPECT_EQ(take(1, 0, "2").front().numel(), large.numel()); // out of order
  channel(0).wait(third);
  EXPECT_EQ(channel(1).counts().untakenBytes, 40u * kMiB);
  EXPECT_EQ(take(1, 0, "0").front().numel(), large.numel()); // makes room for the last value
  channel(0).wait(second);
  EXPECT_EQ(take(1, 0, "1").front().numel(), large.numel());
  EXPECT_EQ(channel(1).counts().untakenBytes, 0u);
}

TEST_F(ChannelTest, AHeldValueIsNotCountedWhenItsWaitIsOver) {
  startInEpoch(2);
  channel(0).wait(put(0, 1, "untaken", {at::ones({60 * kMiB}, at::kByte)}));
  put(0, 1, "held", {at::ones({200 * kMiB}, at::kByte)});
  put(0, 1, "small", {at::ones({1})});
  EXPECT_EQ(take(1, 0, "small").size(), 1u); // so the announcement has come
  const auto expected = post(1, 0, "held");
  channel(1).cancel(expected); // the value is still being received
  EXPECT_EQ(channel(1).wait(expected, kPatienceMs).tensors.size(), 1u);
  EXPECT_EQ(channel(1).counts().untakenBytes, 60u * kMiB);
}

TEST_F(ChannelTest, SenderBlocksUntilItsSmallValuesAreTaken) {
  startInEpoch(2);
  constexpr int kValues = 1000; // twice the bound on open bytes
  std::atomic<int> count{0};
  std::future<void> sender = std::async(std::launch::async, [&] {
    for (int index = 0; index < kValues; ++index) {
      put(0, 1, std::to_string(index), {at::ones({4096})});
      count.store(index + 1);
    }
  });
  EXPECT_EQ(sender.wait_for(milliseconds(300)), std::future_status::timeout);
  EXPECT_LT(count.load(), 520);
  for (int index = 0; index < kValues; ++index) {
    EXPECT_EQ(take(1, 0, std::to_string(index)).size(), 1u);
  }
  sender.get();
}

TEST_F(ChannelTest, PutTimesOutAtAReceiverThatTakesNothing) {
  startInEpoch(2);
  network_.setFault([](const wire::Header& header, SendMode mode) {
    return header.kind == wire::Kind::kPut && mode == SendMode::kRendezvous ? Fate::kDrop : Fate::kDeliver;
  });
  put(0, 1, "first", {at::ones({200 * kMiB}, at::kByte)});
  try {
    (void)channel(0).put(
        peer(0, 1), {"g", 0, "second"}, {{at::ones({100 * kMiB}, at::kByte)}, true}, milliseconds(100));
    FAIL() << "it did not block";
  } catch (const RpcFailure& failure) {
    EXPECT_EQ(failure.kind(), RpcFailure::Kind::kTimedOut);
    EXPECT_TRUE(contains(failure.what(), "tag 'second' of channel 'g'")) << failure.what();
    EXPECT_TRUE(contains(failure.what(), "worker 'w1'")) << failure.what();
  }
}

TEST_F(ChannelTest, FramesInAnyOrderMakeTheirValues) {
  startInEpoch(2);
  std::atomic<int> held{0};
  network_.setFault([&](const wire::Header& header, SendMode /*mode*/) {
    if (header.kind != wire::Kind::kPut) {
      return Fate::kDeliver;
    }
    ++held;
    return Fate::kHold;
  });
  for (int index = 0; index < 3; ++index) {
    put(0, 1, std::to_string(index), {at::full({kMiB}, index), at::full({2}, index)});
  }
  // Another thread may send a frame after put() has returned.
  ASSERT_TRUE(eventually([&] { return held == 9; })) << held; // three for each value
  network_.setFault({});
  network_.releaseHeld();
  for (int index = 0; index < 3; ++index) {
    const std::vector<at::Tensor> got = take(1, 0, std::to_string(index));
    EXPECT_TRUE(got[0].equal(at::full({kMiB}, index)));
    EXPECT_TRUE(got[1].equal(at::full({2}, index)));
  }
}

TEST_F(ChannelTest, ValuesOfAnEarlierEpochAreDropped) {
  startInEpoch(2);
  for (const int64_t size : {int64_t{2}, kMiB}) {
    put(0, 1, "here already", {at::ones({size})});
  }
  put(0, 1, "taken", {});
  EXPECT_TRUE(take(1, 0, "taken").empty());
  const auto expected = post(1, 0, "never");
  channel(1).advance("g", 1);
  EXPECT_EQ(failureOf(1, expected, kPatienceMs), "worker 'w1' is in epoch 1 of channel 'g'");
  EXPECT_EQ(channel(1).counts().untakenBytes, 0u);
  try {
    EXPECT_TRUE(eventually([&] {
      channel(0).wait(put(0, 1, "late", {at::ones({kMiB})})); // the value is dropped, and its memory is free
      return false;
    }));
    FAIL() << "the sender has not been told";
  } catch (const RpcFailure& failure) {
    EXPECT_EQ(failure.kind(), RpcFailure::Kind::kEpochEnded);
    EXPECT_EQ(failure.details().epoch, 1u);
    EXPECT_EQ(failure.details().name, "w1");
  }
  channel(0).advance("g", 1);
  put(0, 1, "late", {at::full({2}, 7)}, 1);
  EXPECT_TRUE(take(1, 0, "late", 1).front().equal(at::full({2}, 7)));
}

TEST_F(ChannelTest, AGroupThatAllHaveClosedMayBeginAgain) {
  startInEpoch(2);
  channel(1).advance("g", 5);
  EXPECT_TRUE(eventually([&] {
    try {
      put(0, 1, "late", {at::ones({1})});
      return false;
    } catch (const RpcFailure&) {
      return true;
    }
  }));
  for (const worker_id_t rank : {0, 1}) {
    channel(rank).close("g");
    channel(rank).advance("g", 0);
  }
  put(0, 1, "again", {at::ones({1})});
  EXPECT_EQ(take(1, 0, "again").size(), 1u);
}

TEST_F(ChannelTest, EachSenderLearnsOnceThatAnEpochHasEnded) {
  startInEpoch(2);
  std::atomic<int> refusals{0};
  network_.setFault([&](const wire::Header& header, SendMode) {
    refusals += header.kind == wire::Kind::kPutRefused ? 1 : 0;
    return LoopbackNetwork::Fate::kDeliver;
  });
  for (int value = 0; value < 5; ++value) {
    put(0, 1, std::to_string(value), {at::ones({2})});
  }
  put(0, 1, "taken", {});
  EXPECT_TRUE(take(1, 0, "taken").empty());
  channel(1).advance("g", 1);
  put(1, 0, "after", {}, 1); // it cannot overtake an earlier frame
  channel(0).advance("g", 1);
  EXPECT_TRUE(take(0, 1, "after", 1).empty());
  EXPECT_EQ(refusals.load(), 1);
  network_.setFault({});
}

TEST_F(ChannelTest, EpochEndsAWaitOnlyOnceItsTensorIsNoLongerWritten) {
  startInEpoch(2);
  const at::Tensor into = at::zeros({kMiB}, at::kByte);
  const auto expected = post(1, 0, "x", std::vector<at::Tensor>{into});
  IncomingMessage message = announceForPosted();
  EXPECT_EQ(message.spans.front().data.get(), into.data_ptr());

  std::future<std::string> waits = std::async(std::launch::async, [&] { return failureOf(1, expected, kPatienceMs); });
  channel(1).advance("g", 1);
  EXPECT_EQ(waits.wait_for(milliseconds(100)), std::future_status::timeout) << "the tensor is still written";
  channel(1).onPut(std::move(message), {});
  EXPECT_EQ(waits.get(), "worker 'w1' is in epoch 1 of channel 'g'");
}

TEST_F(ChannelTest, ValuesOfALaterEpochWait) {
  startInEpoch(2);
  channel(0).advance("g", 5);
  put(0, 1, "small", {at::ones({2})}, 5);
  channel(0).wait(put(0, 1, "large", {at::ones({kMiB})}, 5));
  EXPECT_TRUE(contains(failureOf(1, post(1, 0, "small"), milliseconds(50)), "no value has come from worker 'w0'"));
  channel(1).advance("g", 5);
  EXPECT_EQ(take(1, 0, "small", 5).size(), 1u);
  EXPECT_EQ(take(1, 0, "large", 5).size(), 1u);
}

TEST_F(ChannelTest, EarlierEpochsOfAllGroupsEndTogether) {
  startInEpoch(2);
  const auto putTo = [&](const std::string& group, uint64_t epoch) {
    channel(0).advance(group, epoch);
    const Channel::Value value{{at::ones({kMiB}, at::kByte)}, /*isSingle=*/true};
    channel(0).wait(channel(0).put(peer(0, 1), {group, epoch, "x"}, value, kPatienceMs));
  };
  putTo("group", 4);
  putTo("other", 4);
  EXPECT_EQ(channel(1).counts().untakenBytes, 2 * kMiB);
  channel(1).advanceAll("gr", 5);
  EXPECT_EQ(channel(1).counts().untakenBytes, kMiB) << "of the other group";
  putTo("grown", 4);
  putTo("group", 5);
  EXPECT_EQ(channel(1).counts().untakenBytes, 2 * kMiB) << "a late value is dropped";
}

TEST_F(ChannelTest, ValueThatComesAfterATimeoutGoesToTheNextWait) {
  startInEpoch(2);
  const at::Tensor first = at::zeros({kMiB});
  const std::string what = failureOf(1, post(1, 0, "x", std::vector<at::Tensor>{first}), milliseconds(50));
  EXPECT_TRUE(contains(what, "under tag 'x' of channel 'g' (epoch 0) within 50 ms")) << what;
  put(0, 1, "x", {at::ones({kMiB})});
  EXPECT_TRUE(take(1, 0, "x").front().equal(at::ones({kMiB})));
  EXPECT_TRUE(first.equal(at::zeros({kMiB})));
}

TEST_F(ChannelTest, ValueOfAnEndedWaitGoesToTheNextWait) {
  startInEpoch(2);
  const at::Tensor first = at::zeros({kMiB}, at::kByte);
  const auto ended = post(1, 0, "x", std::vector<at::Tensor>{first});
  const auto next = post(1, 0, "x");
  IncomingMessage message = announceForPosted();
  EXPECT_NE(failureOf(1, ended, milliseconds(50)), "") << "its value is still being received";
  std::memset(message.spans.front().data.get(), 7, kMiB);
  channel(1).onPut(std::move(message), {});
  EXPECT_TRUE(channel(1).wait(next, milliseconds(1000)).tensors.front().equal(at::full({kMiB}, 7, at::kByte)));
  put(0, 1, "x", {at::ones({2})});
  EXPECT_EQ(take(1, 0, "x").front().numel(), 2) << "each value is taken once";
}

TEST_F(ChannelTest, ValueOfAnEndedWaitGoesToItsRepetition) {
  startInEpoch(2);
  const at::Tensor into = at::zeros({kMiB}, at::kByte);
  const auto expected = post(1, 0, "x", std::vector<at::Tensor>{into});
  IncomingMessage message = announceForPosted();
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_TRUE(contains(failureOf(1, expected, milliseconds(50)), "no value has come"));
  }
  std::memset(message.spans.front().data.get(), 7, kMiB);
  channel(1).onPut(std::move(message), {});
  EXPECT_TRUE(channel(1).wait(expected, milliseconds(1000)).tensors.front().is_same(into));
  EXPECT_TRUE(into.equal(at::full({kMiB}, 7, at::kByte)));
  EXPECT_THROW((void)channel(1).wait(expected, milliseconds(1000)), std::runtime_error) << "the value is taken once";
}

TEST_F(ChannelTest, WaitTimesOutWithoutAnEvent) {
  startInEpoch(2);
  // A driver sleeps for half a second, unless something wakes it. A busy machine may be late a few times.
  bool endsEarlier = false;
  for (int attempt = 0; !endsEarlier && attempt < 5; ++attempt) {
    const auto shorterSleep = std::async(std::launch::async, [] { std::this_thread::sleep_for(milliseconds(450)); });
    EXPECT_NE(failureOf(1, post(1, 0, "never"), milliseconds(20)), "");
    endsEarlier = shorterSleep.wait_for(milliseconds(0)) == std::future_status::timeout;
  }
  EXPECT_TRUE(endsEarlier);
}

TEST_F(ChannelTest, DeathOfTheSenderEndsWaits) {
  startInEpoch(3);
  put(0, 1, "last words", {at::ones({2})});
  put(0, 1, "taken", {});
  EXPECT_TRUE(take(1, 0, "taken").empty());
  EXPECT_EQ(textOf(*answer(call(1, 0, "has an endpoint"))), "has an endpoint");
  const auto expected = post(1, 0, "never");
  const auto large = post(1, 0, "large", std::vector<at::Tensor>{at::zeros({kMiB})});
  fault(wire::Kind::kPut, 0, Fate::kHold);
  put(0, 1, "large", {at::ones({kMiB})});
  network_.kill("address 0");
  for (const auto& lost : {expected, large, post(1, 0, "posted after it")}) {
    EXPECT_TRUE(contains(failureOf(1, lost, kPatienceMs), "lost worker 'w0'"));
  }
  EXPECT_TRUE(take(1, 0, "last words").front().equal(at::ones({2})));
  EXPECT_THROW(put(1, 0, "x", {at::ones({2})}), RpcFailure);
}

TEST_F(ChannelTest, ShutdownEndsWaits) {
  startInEpoch(2);
  std::future<std::string> waits =
      std::async(std::launch::async, [&] { return failureOf(1, post(1, 0, "never"), milliseconds(0)); });
  EXPECT_EQ(waits.wait_for(milliseconds(100)), std::future_status::timeout);
  agent(1).shutdown();
  EXPECT_EQ(waits.get(), "RPC has been shut down on worker 'w1'");
  for (const auto& late :
       {std::function<void()>([&] { (void)post(1, 0, "late"); }), {[&] { (void)put(1, 0, "late", {}); }}}) {
    try {
      late();
      FAIL() << "the group is closed";
    } catch (const RpcFailure& failure) {
      EXPECT_EQ(failure.kind(), RpcFailure::Kind::kShutDown);
    }
  }
}

TEST_F(ChannelTest, ThreadsThatWaitTogetherGetTheirValues) {
  startInEpoch(2);
  std::vector<std::future<int64_t>> takers;
  takers.reserve(8);
  for (int index = 0; index < 8; ++index) {
    takers.push_back(std::async(std::launch::async, [this, index] {
      int64_t sum = 0;
      for (int round = 0; round < 50; ++round) {
        sum += take(1, 0, std::to_string(index) + "." + std::to_string(round)).front().item<int64_t>();
      }
      return sum;
    }));
  }
  for (int round = 0; round < 50; ++round) {
    for (int index = 0; index < 8; ++index) {
      put(0, 1, std::to_string(index) + "." + std::to_string(round), {at::full({1}, index, at::kLong)});
    }
  }
  for (int index = 0; index < 8; ++index) {
    EXPECT_EQ(takers[static_cast<size_t>(index)].get(), 50 * index);
  }
}

TEST_F(ChannelTest, WorkerPutsToItself) {
  startInEpoch(1);
  for (const std::vector<at::Tensor>& value : valuesOfAllSizes()) {
    channel(0).wait(put(0, 0, "x", value));
    EXPECT_EQ(take(0, 0, "x").size(), value.size());
  }
}

} // namespace
} // namespace torch_ucx_rpc
