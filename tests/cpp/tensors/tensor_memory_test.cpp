// Which memory of tensors travels, for how long it is lent, and what arrived tensors share.

#include "codec.h"
#include "memory/host_pool.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

TEST(TensorMemoryTest, LargeTensorsAreSpansInThePool) {
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  const at::Tensor sent = at::rand({5, 1000, 257});
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent});
  ASSERT_EQ(outgoing->spans.size(), 1u);
  EXPECT_EQ(outgoing->spans[0].bytes.data(), sent.const_data_ptr()) << "lent, not copied";
  EXPECT_LT(outgoing->body.size(), 1000u);
  {
    const c10::intrusive_ptr<Message> message = decode(arrive(*outgoing));
    expectSame(sent, message->tensors().at(0));
    EXPECT_GT(HostPool::instance().statistics().inUseBytes, before);
  }
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before);
}

TEST(TensorMemoryTest, TheEncodedMessageKeepsItsMemoryAlive) {
  at::Tensor sent = at::rand({100'000});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(sent.storage().getWeakStorageImpl());
  std::unique_ptr<OutgoingMessage> outgoing = encode({std::move(sent)});
  EXPECT_FALSE(storage.expired());
  EXPECT_TRUE(outgoing->lender->mayRunUserCode());
  outgoing.reset();
  EXPECT_TRUE(storage.expired());
}

// Makes a tensor in memory of the host pool. The pool's statistics show its release.
at::Tensor pooled(int64_t elements) {
  at::Tensor tensor = travel(at::zeros({elements}));
  EXPECT_EQ(tensor.storage().allocator(), &HostPool::instance());
  return tensor;
}

struct Swap {
  const char* name;
  std::function<void(at::Tensor&)> away; // makes the tensor leave its memory
};

const Swap kSwaps[] = {
    {"data = ", [](at::Tensor& tensor) { tensor.set_data(at::zeros({1})); }},
    {"set_()", [](at::Tensor& tensor) { tensor.set_(); }},
    {"resize_()", [](at::Tensor& tensor) { tensor.resize_({2 * tensor.numel()}); }},
    {"storage().resize_(0)",
     [](at::Tensor& tensor) {
       tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::GetCPUAllocator()->allocate(0));
     }},
    {"out=",
     [](at::Tensor& tensor) {
       const at::Tensor more = at::ones({tensor.numel() + 1000});
       tensor.resize_({0}); // torch does this to an output of another size
       at::add_out(tensor, more, more);
     }},
};

TEST(TensorMemoryTest, LentMemoryOutlivesEveryChangeOfItsTensor) {
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  for (const Swap& swap : kSwaps) {
    for (const bool isPooled : {true, false}) {
      SCOPED_TRACE(swap.name);
      at::Tensor sent = isPooled ? pooled(300'000) : at::empty({300'000});
      sent.fill_(7);
      const at::Tensor expected = sent.clone();
      std::unique_ptr<OutgoingMessage> outgoing = encode({sent});
      const std::unique_ptr<OutgoingMessage> again = encode({sent.narrow(0, 0, 100'000)});
      ASSERT_EQ(outgoing->spans[0].bytes.data(), sent.const_data_ptr()) << "lent, not copied";
      swap.away(sent);
      sent = at::Tensor();
      // torch must now get other memory of that size.
      const at::Tensor next = isPooled ? pooled(300'000) : at::empty({300'000});
      ASSERT_NE(next.const_data_ptr(), static_cast<const void*>(outgoing->spans[0].bytes.data()));
      next.fill_(8);
      expectSame(expected, decode(arrive(*outgoing))->tensors().at(0));
      outgoing.reset();
      expectSame(expected.narrow(0, 0, 100'000), decode(arrive(*again))->tensors().at(0));
    }
  }
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before) << "loans end";
}

TEST(TensorMemoryTest, TensorsLentBeforeCanBeResizedAndLentAgain) {
  at::Tensor tensor = at::full({100'000}, 1.);
  for (int round = 0; round < 3; ++round) {
    std::unique_ptr<OutgoingMessage> outgoing = encode({tensor, tensor.narrow(0, 5, 50'000)});
    expectSame(tensor, decode(arrive(*outgoing))->tensors().at(0));
    outgoing.reset();
    tensor.resize_({tensor.numel() * 2}).fill_(round);
  }
  expectSame(tensor, travel(tensor));
}

TEST(TensorMemoryTest, ThreadsCanLendTheSameTensor) {
  const at::Tensor sent = at::rand({100'000});
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&sent] {
      for (int round = 0; round < 50; ++round) {
        const std::unique_ptr<OutgoingMessage> outgoing = encode({sent});
        EXPECT_EQ(outgoing->spans[0].bytes.data(), sent.const_data_ptr());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  expectSame(sent, travel(sent));
}

TEST(TensorMemoryTest, CopyOnWriteMemoryIsCopiedAtOnce) {
  at::Tensor base = at::full({100'000}, 1.f);
  const at::Tensor lazy = at::_lazy_clone(base);
  const std::unique_ptr<OutgoingMessage> outgoing = encode({lazy});
  base = at::Tensor();
  lazy.fill_(2.f);
  EXPECT_TRUE(decode(arrive(*outgoing))->tensors().at(0).eq(1).all().item<bool>());
}

TEST(TensorMemoryTest, OnlyReachedBytesTravel) {
  const at::Tensor base = at::rand({10'000'000});
  const std::unique_ptr<OutgoingMessage> few = encode({base.narrow(0, 1000, 10)});
  EXPECT_LT(few->totalBytes(), 1000u);
  const std::unique_ptr<OutgoingMessage> some = encode({base.narrow(0, 1000, 50'000)});
  EXPECT_LT(some->totalBytes(), 201'000u);
}

TEST(TensorMemoryTest, ViewsWithLargeHolesArePacked) {
  const at::Tensor base = at::rand({1000, 1000});
  const at::Tensor column = base.select(1, 5);
  const std::unique_ptr<OutgoingMessage> outgoing = encode({column});
  EXPECT_LT(outgoing->totalBytes(), 5000u);
  expectSame(column, decode(arrive(*outgoing))->tensors().at(0));
  expectSame(base.slice(0, 0, 1000, 7), travel(base.slice(0, 0, 1000, 7)));
}

TEST(TensorMemoryTest, SharedMemoryIsSharedAfterArrival) {
  for (const int64_t scale : {1, 10'000}) { // inline, and as a span
    const at::Tensor base = at::arange(20. * static_cast<double>(scale));
    const std::vector<at::Tensor> received = travel(
        {base.narrow(0, 0, 10 * scale),
         base.narrow(0, 5 * scale, 10 * scale),
         base,
         base.reshape({4, -1}).t(),
         base.clone()});
    expectSame(base.narrow(0, 5 * scale, 10 * scale), received[1]);
    received[0][5 * scale] = -1;
    EXPECT_EQ(received[1][0].item<double>(), -1);
    EXPECT_EQ(received[2][5 * scale].item<double>(), -1);
    EXPECT_EQ(received[3].t().reshape({-1})[5 * scale].item<double>(), -1);
    EXPECT_NE(received[4][5 * scale].item<double>(), -1) << "a copy has memory of its own";
    EXPECT_NE(base[5 * scale].item<double>(), -1) << "never the sender's memory";
    EXPECT_TRUE(received[0].is_alias_of(received[2]));
    EXPECT_FALSE(received[0].is_alias_of(received[4]));
  }
}

TEST(TensorMemoryTest, TheSameTensorTwiceTravelsOnce) {
  const at::Tensor sent = at::rand({100'000});
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent, sent});
  EXPECT_EQ(outgoing->spans.size(), 1u);
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  EXPECT_TRUE(received[0].is_alias_of(received[1]));
}

TEST(TensorMemoryTest, ViewsOfAnotherDtypeShareMemoryToo) {
  const at::Tensor bytes = at::arange(0, 96, at::kByte);
  const at::Tensor ints = bytes.view(at::kInt).narrow(0, 1, 10);
  const std::vector<at::Tensor> received = travel({bytes.narrow(0, 3, 60), ints}); // at 3 and 4: no int apart
  expectSame(bytes.narrow(0, 3, 60), received[0]);
  expectSame(ints, received[1]);
  received[1][0] = 0;
  EXPECT_EQ(received[0][1].item<uint8_t>(), 0);
}

TEST(TensorMemoryTest, OverlappingViewsOfOtherDtypesShipOnlyReachedBytes) {
  for (const int64_t scale : {1, 100'000}) { // inline, and as a span
    const at::Tensor base = at::randint(0, 256, {4'000'000}, at::kByte);
    const int64_t begin = base.numel() - 12 * scale - 3;
    const at::Tensor bytes = base.narrow(0, begin, 8 * scale); // begins at an odd byte
    const at::Tensor ints = base.narrow(0, begin + 3, 12 * scale).view(at::kInt);
    const at::Tensor doubles = base.narrow(0, base.numel() - 8 * scale, 8 * scale).view(at::kDouble);
    const std::unique_ptr<OutgoingMessage> outgoing = encode({ints, bytes, doubles});
    EXPECT_LT(outgoing->totalBytes(), static_cast<uint64_t>(12 * scale) + 1000);
    const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
    expectSame(ints, received[0]);
    expectSame(bytes, received[1]);
    EXPECT_TRUE(received[2].view(at::kByte).equal(doubles.view(at::kByte))); // NaNs
    received[1].fill_(1);
    EXPECT_EQ(received[0][0].item<int32_t>(), 0x01010101) << "they still share memory";
  }
}

TEST(TensorMemoryTest, StoragesAFractionOfAnElementApartArriveApart) {
  const auto memory = std::make_shared<std::vector<uint8_t>>(200'003);
  std::iota(memory->begin(), memory->end(), uint8_t{0});
  const auto keep = [memory](void*) {};
  for (const int64_t elements : {5, 50'000}) { // inline, and as spans
    const at::Tensor bytes = at::from_blob(memory->data(), {4 * elements}, keep, at::kByte);
    const at::Tensor ints = at::from_blob(memory->data() + 3, {elements}, keep, at::kInt);
    const std::vector<at::Tensor> received = travel({bytes, ints});
    expectSame(bytes, received[0]);
    EXPECT_EQ(std::memcmp(received[1].const_data_ptr(), memory->data() + 3, 4 * elements), 0);
  }
}

TEST(TensorMemoryTest, BorrowedMemoryIsCopiedAtOnce) {
  std::vector<float> memory(50'000, 1.f);
  const at::Tensor sent = at::from_blob(memory.data(), {50'000});
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent, sent.narrow(0, 7, 3)});
  std::fill(memory.begin(), memory.end(), 2.f); // the owner may do this once send() has returned
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  EXPECT_TRUE(received[0].eq(1).all().item<bool>());
  EXPECT_TRUE(received[1].eq(1).all().item<bool>());
}

TEST(TensorMemoryTest, ReceivedTensorsCanBeResizedAndWritten) {
  for (const int64_t elements : {10, 100'000}) {
    const at::Tensor received = travel(at::ones({elements}));
    received.resize_({4 * elements});
    received.fill_(2);
    EXPECT_EQ(received.sum().item<double>(), 8. * static_cast<double>(elements));
  }
}

std::vector<at::Tensor> numbered(int64_t count, int64_t elements) {
  std::vector<at::Tensor> tensors;
  for (int64_t number = 0; number < count; ++number) {
    tensors.push_back(at::full({elements}, number, at::kInt));
  }
  return tensors;
}

void expectNumbered(const std::vector<at::Tensor>& tensors, int64_t elements) {
  for (size_t number = 0; number < tensors.size(); ++number) {
    ASSERT_EQ(tensors[number].numel(), elements);
    ASSERT_TRUE(tensors[number].eq(static_cast<int64_t>(number)).all().item<bool>()) << number;
  }
}

TEST(TensorMemoryTest, ManySmallTensorsArePackedIntoSpansOfOnePiece) {
  constexpr int64_t kCount = 40'000;
  constexpr int64_t kElements = 1000;
  constexpr uint64_t kBytes = kCount * kElements * sizeof(int32_t);
  const std::unique_ptr<OutgoingMessage> outgoing = encode(numbered(kCount, kElements));
  const uint64_t records = kCount * (sizeof(wire::StorageRecord) + sizeof(wire::TensorRecord) + 2 * sizeof(int64_t));
  EXPECT_LE(outgoing->body.size(), (1u << 20) + records + 100);
  EXPECT_EQ(outgoing->totalBytes(), kBytes + records + sizeof(wire::BodyPrefix) + 1);
  EXPECT_LE(outgoing->spans.size(), kBytes / (OutgoingMessage::kPieceBytes - kElements * sizeof(int32_t)) + 1);
  for (const OutgoingMessage::Span& span : outgoing->spans) {
    EXPECT_LE(span.bytes.size(), OutgoingMessage::kPieceBytes);
  }
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  ASSERT_EQ(received.size(), static_cast<size_t>(kCount));
  expectNumbered(received, kElements);
}

TEST(TensorMemoryTest, PackedTensorsHaveSeparateMemoryAfterArrival) {
  constexpr int64_t kElements = 8000;
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  std::vector<at::Tensor> received = travel(numbered(200, kElements));
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before) << "a pack ends when it is decoded";
  received[150].resize_({2 * kElements}).fill_(-1);
  received[199].fill_(-1);
  received.resize(150);
  expectNumbered(received, kElements);
}

TEST(TensorMemoryTest, PackedTensorsEqualTheSentOnes) {
  std::vector<at::Tensor> sent = numbered(70, 8000); // 2.2 MB: inline and packed
  sent.push_back(at::rand({2'000'000}));
  sent.push_back(at::rand({5, 7}).to_sparse());
  sent.push_back(at::empty({0}));
  sent.push_back(sent[69].narrow(0, 100, 10)); // shares memory with a packed one
  sent.push_back(at::rand({100, 80}, at::kDouble).t());
  const std::unique_ptr<OutgoingMessage> outgoing = encode(sent, std::vector<char>(100'000, 'p'));
  const c10::intrusive_ptr<Message> message = decode(arrive(*outgoing));
  EXPECT_EQ(message->payload(), std::vector<char>(100'000, 'p'));
  ASSERT_EQ(message->tensors().size(), sent.size());
  for (size_t index = 0; index < sent.size(); ++index) {
    expectSame(sent[index], message->tensors()[index]);
  }
  EXPECT_TRUE(message->tensors()[73].is_alias_of(message->tensors()[69]));
}

TEST(TensorMemoryTest, AMessageHasABoundedNumberOfSpans) {
  std::vector<at::Tensor> sent = numbered(3000, 9000); // 36 KB each, beyond what may be inline
  sent.push_back(at::full({300'000}, 3000, at::kInt)); // this one and the next are lent
  sent.push_back(at::full({200'000}, 3001, at::kInt));
  const std::unique_ptr<OutgoingMessage> outgoing = encode(sent);
  EXPECT_LE(outgoing->spans.size(), 600u);
  const auto isLent = [&](const at::Tensor& tensor) {
    return std::any_of(outgoing->spans.begin(), outgoing->spans.end(), [&](const OutgoingMessage::Span& span) {
      return span.bytes.data() == tensor.const_data_ptr();
    });
  };
  EXPECT_TRUE(isLent(sent[3000])) << "large ones are not copied";
  EXPECT_TRUE(isLent(sent[3001])) << "nor the largest of the others";
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  ASSERT_EQ(received.size(), sent.size());
  for (size_t index = 0; index < sent.size(); ++index) {
    ASSERT_TRUE(received[index].equal(sent[index])) << index;
  }
  EXPECT_EQ(encode(numbered(512, 9000))->spans.size(), 512u) << "few are lent, one by one";
}

} // namespace
} // namespace torch_ucx_rpc
