#include "tensors/tensor_codec.h"

#include "eventually.h"
#include "loopback_transport.h"
#include "memory/host_pool.h"

#include <ATen/ATen.h>
#include <ATen/native/quantized/AffineQuantizerBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using torch::distributed::rpc::MessageType;

const Peer& peer() {
  static const Peer* const peer = [] {
    Member member;
    member.rank = 3;
    member.name = "ps";
    member.host = "node07";
    return new Peer(std::move(member));
  }();
  return *peer;
}

std::unique_ptr<OutgoingMessage> encode(std::vector<at::Tensor> tensors, std::vector<char> payload = {'p'}) {
  LoopbackNetwork network;
  const std::unique_ptr<Transport> transport = network.makeTransport("sender");
  return encodeMessage(
      c10::make_intrusive<Message>(std::move(payload), std::move(tensors), MessageType::PYTHON_CALL),
      peer(),
      {},
      transport.get());
}

// Delivers a message without a transport.
IncomingMessage arrive(const OutgoingMessage& outgoing) {
  IncomingMessage incoming;
  incoming.header = outgoing.header;
  incoming.eagerBody = Bytes(std::span<const std::byte>(outgoing.body));
  for (const OutgoingMessage::Span& span : outgoing.spans) {
    c10::DataPtr data = HostPool::instance().allocate(span.bytes.size());
    std::memcpy(data.get(), span.bytes.data(), span.bytes.size());
    incoming.spans.push_back({std::move(data), span.bytes.size()});
  }
  return incoming;
}

c10::intrusive_ptr<Message> decode(IncomingMessage incoming) {
  DecodedMessage decoded;
  const Error error = decodeMessage(std::move(incoming), {}, decoded);
  EXPECT_FALSE(error) << error.message();
  return decoded.message;
}

std::vector<at::Tensor> travel(std::vector<at::Tensor> tensors) {
  const std::unique_ptr<OutgoingMessage> outgoing = encode(std::move(tensors));
  return decode(arrive(*outgoing))->tensors();
}

at::Tensor travel(const at::Tensor& tensor) {
  return travel(std::vector<at::Tensor>{tensor}).at(0);
}

void expectSame(const at::Tensor& sent, const at::Tensor& received) {
  ASSERT_TRUE(received.defined());
  EXPECT_EQ(received.dtype(), sent.dtype());
  EXPECT_EQ(received.layout(), sent.layout());
  EXPECT_EQ(received.sizes(), sent.sizes());
  EXPECT_EQ(received.requires_grad(), sent.requires_grad());
  EXPECT_TRUE(received.is_leaf());
  EXPECT_EQ(received.is_conj(), sent.is_conj());
  EXPECT_EQ(received.is_neg(), sent.is_neg());
  at::Tensor a = sent.detach();
  at::Tensor b = received.detach();
  if (a.layout() != at::kStrided) {
    a = a.to_dense();
    b = b.to_dense();
  }
  if (a.is_quantized()) {
    EXPECT_EQ(a.qscheme(), b.qscheme());
    a = a.dequantize();
    b = b.dequantize();
  }
  EXPECT_TRUE(a.equal(b)) << a << "\n" << b;
}

void expectSameStrided(const at::Tensor& sent) {
  const at::Tensor received = travel(sent);
  expectSame(sent, received);
  EXPECT_EQ(received.strides(), sent.strides());
}

TEST(TensorCodecTest, PayloadAndTypeArrive) {
  for (const size_t size : {0u, 1u, 7u, 64u * 1024, 64u * 1024 + 1, 5u * 1024 * 1024}) {
    std::vector<char> payload(size);
    std::iota(payload.begin(), payload.end(), '\0');
    const std::unique_ptr<OutgoingMessage> outgoing = encode({}, payload);
    const c10::intrusive_ptr<Message> message = decode(arrive(*outgoing));
    EXPECT_EQ(message->payload(), payload);
    EXPECT_EQ(message->type(), MessageType::PYTHON_CALL);
    EXPECT_TRUE(message->tensors().empty());
  }
}

TEST(TensorCodecTest, EveryDtypeArrives) {
  for (const at::ScalarType dtype :
       {at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kUInt16,
        at::kUInt32,
        at::kUInt64,
        at::kHalf,
        at::kBFloat16,
        at::kFloat,
        at::kDouble,
        at::kComplexFloat,
        at::kComplexDouble,
        at::kBool,
        at::kFloat8_e4m3fn,
        at::kFloat8_e5m2}) {
    const at::Tensor sent = at::arange(0, 24).remainder(2).reshape({4, 6}).to(dtype);
    const at::Tensor received = travel(sent);
    EXPECT_EQ(received.dtype(), sent.dtype());
    EXPECT_EQ(received.sizes(), sent.sizes());
    EXPECT_EQ(std::memcmp(received.const_data_ptr(), sent.const_data_ptr(), sent.nbytes()), 0) << dtype;
  }
}

TEST(TensorCodecTest, StridesAreKept) {
  const at::Tensor base = at::arange(120.).reshape({4, 5, 6});
  expectSameStrided(base);
  expectSameStrided(base.transpose(0, 2));
  expectSameStrided(base.slice(1, 1, 4));
  expectSameStrided(base.slice(2, 0, 6, 2));
  expectSameStrided(base.select(1, 3));
  expectSameStrided(base.select(0, 1).expand({7, 5, 6})); // stride 0
  expectSameStrided(base.as_strided({3, 3}, {1, 1}, 5)); // overlaps itself
  expectSameStrided(at::rand({2, 3, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast));
  expectSameStrided(at::rand({1, 1, 1}).as_strided({1, 1, 1}, {17, 3, 1000}));
}

TEST(TensorCodecTest, ScalarsAndEmptyTensorsArrive) {
  expectSameStrided(at::scalar_tensor(3.5));
  expectSameStrided(at::empty({0}));
  expectSameStrided(at::empty({3, 0, 2}));
  expectSameStrided(at::rand({10}).slice(0, 10, 10)); // at the end of its storage
  expectSameStrided(at::empty({0, 1 << 20}));
}

TEST(TensorCodecTest, LargeTensorsAreSpansInThePool) {
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

TEST(TensorCodecTest, TheEncodedMessageKeepsItsMemoryAlive) {
  at::Tensor sent = at::rand({100'000});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(sent.storage().getWeakStorageImpl());
  std::unique_ptr<OutgoingMessage> outgoing = encode({std::move(sent)});
  EXPECT_FALSE(storage.expired());
  EXPECT_TRUE(outgoing->lender->mayRunUserCode());
  outgoing.reset();
  EXPECT_TRUE(storage.expired());
}

// A storage like torch's own, in memory of the host pool, whose release shows in the pool's statistics.
at::Tensor pooled(int64_t elements) {
  at::Tensor tensor = travel(at::zeros({elements}));
  EXPECT_EQ(tensor.storage().allocator(), &HostPool::instance());
  return tensor;
}

struct Swap {
  const char* name;
  std::function<void(at::Tensor&)> away; // from the tensor's memory
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
       tensor.resize_({0}); // as torch does to an output of another size
       at::add_out(tensor, more, more);
     }},
};

TEST(TensorCodecTest, LentMemoryOutlivesEveryChangeOfItsTensor) {
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
      // torch must get other memory of that size now.
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

TEST(TensorCodecTest, TensorsLentBeforeCanBeResizedAndLentAgain) {
  at::Tensor tensor = at::full({100'000}, 1.);
  for (int round = 0; round < 3; ++round) {
    std::unique_ptr<OutgoingMessage> outgoing = encode({tensor, tensor.narrow(0, 5, 50'000)});
    expectSame(tensor, decode(arrive(*outgoing))->tensors().at(0));
    outgoing.reset();
    tensor.resize_({tensor.numel() * 2}).fill_(round);
  }
  expectSame(tensor, travel(tensor));
}

TEST(TensorCodecTest, ThreadsCanLendTheSameTensor) {
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

TEST(TensorCodecTest, CopyOnWriteMemoryIsCopiedAtOnce) {
  at::Tensor base = at::full({100'000}, 1.f);
  const at::Tensor lazy = at::_lazy_clone(base);
  const std::unique_ptr<OutgoingMessage> outgoing = encode({lazy});
  base = at::Tensor();
  lazy.fill_(2.f);
  EXPECT_TRUE(decode(arrive(*outgoing))->tensors().at(0).eq(1).all().item<bool>());
}

TEST(TensorCodecTest, OnlyReachedBytesTravel) {
  const at::Tensor base = at::rand({10'000'000});
  const std::unique_ptr<OutgoingMessage> few = encode({base.narrow(0, 1000, 10)});
  EXPECT_LT(few->totalBytes(), 1000u);
  const std::unique_ptr<OutgoingMessage> some = encode({base.narrow(0, 1000, 50'000)});
  EXPECT_LT(some->totalBytes(), 201'000u);
}

TEST(TensorCodecTest, ViewsWithLargeHolesArePacked) {
  const at::Tensor base = at::rand({1000, 1000});
  const at::Tensor column = base.select(1, 5);
  const std::unique_ptr<OutgoingMessage> outgoing = encode({column});
  EXPECT_LT(outgoing->totalBytes(), 5000u);
  expectSame(column, decode(arrive(*outgoing))->tensors().at(0));
  expectSame(base.slice(0, 0, 1000, 7), travel(base.slice(0, 0, 1000, 7)));
}

TEST(TensorCodecTest, SharedMemoryIsSharedAfterArrival) {
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
    EXPECT_NE(received[4][5 * scale].item<double>(), -1) << "a copy is a copy";
    EXPECT_NE(base[5 * scale].item<double>(), -1) << "never the sender's memory";
    EXPECT_TRUE(received[0].is_alias_of(received[2]));
    EXPECT_FALSE(received[0].is_alias_of(received[4]));
  }
}

TEST(TensorCodecTest, TheSameTensorTwiceTravelsOnce) {
  const at::Tensor sent = at::rand({100'000});
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent, sent});
  EXPECT_EQ(outgoing->spans.size(), 1u);
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  EXPECT_TRUE(received[0].is_alias_of(received[1]));
}

TEST(TensorCodecTest, ViewsOfAnotherDtypeShareMemoryToo) {
  const at::Tensor bytes = at::arange(0, 96, at::kByte);
  const at::Tensor ints = bytes.view(at::kInt).narrow(0, 1, 10);
  const std::vector<at::Tensor> received = travel({bytes.narrow(0, 3, 60), ints}); // 3 and 4: no whole int apart
  expectSame(bytes.narrow(0, 3, 60), received[0]);
  expectSame(ints, received[1]);
  received[1][0] = 0;
  EXPECT_EQ(received[0][1].item<uint8_t>(), 0);
}

TEST(TensorCodecTest, OverlappingViewsOfOtherDtypesShipOnlyReachedBytes) {
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

TEST(TensorCodecTest, StoragesAFractionOfAnElementApartArriveApart) {
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

TEST(TensorCodecTest, LazyBitsArriveUnresolved) {
  const at::Tensor complex = at::rand({50, 20}, at::kComplexFloat);
  expectSameStrided(complex.conj());
  expectSameStrided(at::imag(complex.conj())); // negative bit
  expectSameStrided(complex.conj()._neg_view());
  expectSameStrided(at::rand({9000, 5}, at::kComplexFloat).conj().t());
  const at::Tensor withHoles = at::rand({2000, 100}, at::kComplexFloat).conj().select(1, 3);
  expectSame(withHoles, travel(withHoles));
}

TEST(TensorCodecTest, ZeroTensorsArriveAsZeros) {
  const at::Tensor received = travel(at::_efficientzerotensor({3, 4}));
  EXPECT_TRUE(received.equal(at::zeros({3, 4})));
  received.fill_(1);
  EXPECT_TRUE(received.equal(at::ones({3, 4})));
}

TEST(TensorCodecTest, UndefinedTensorsArriveUndefined) {
  const std::vector<at::Tensor> received = travel({at::Tensor(), at::ones({2}), at::Tensor()});
  EXPECT_FALSE(received[0].defined());
  EXPECT_TRUE(received[1].equal(at::ones({2})));
  EXPECT_FALSE(received[2].defined());
}

TEST(TensorCodecTest, RequiresGradIsKept) {
  const at::Tensor leaf = at::rand({3}).set_requires_grad(true);
  const at::Tensor derived = leaf * 2;
  const std::vector<at::Tensor> received = travel({leaf, derived, at::rand({3})});
  EXPECT_TRUE(received[0].requires_grad());
  EXPECT_TRUE(received[1].requires_grad());
  EXPECT_TRUE(received[1].is_leaf());
  EXPECT_FALSE(received[2].requires_grad());
  EXPECT_TRUE(travel(at::rand({3, 4}).to_sparse().set_requires_grad(true)).requires_grad());
}

TEST(TensorCodecTest, GradModeOfTheThreadDoesNotChangeArrivedTensors) {
  const at::Tensor sent = at::rand({3}).set_requires_grad(true);
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent});
  const at::NoGradGuard guard;
  const at::Tensor received = decode(arrive(*outgoing))->tensors().at(0);
  EXPECT_TRUE(received.requires_grad());
  EXPECT_FALSE(received.is_inference());
}

TEST(TensorCodecTest, SparseTensorsArrive) {
  const at::Tensor dense = at::rand({8, 12}) * at::rand({8, 12}).gt(0.6);
  expectSame(dense.to_sparse(), travel(dense.to_sparse()));
  EXPECT_TRUE(travel(dense.to_sparse()).is_coalesced());
  const at::Tensor hybrid = at::rand({6, 7, 3}).to_sparse(2);
  expectSame(hybrid, travel(hybrid));
  EXPECT_EQ(travel(hybrid).dense_dim(), 1);
  const at::Tensor uncoalesced = at::sparse_coo_tensor(
      at::tensor({0, 0, 1, 2, 2, 0}, at::kLong).reshape({2, 3}), at::tensor({1.0, 2.0, 3.0}), {3, 3});
  const at::Tensor received = travel(uncoalesced);
  EXPECT_FALSE(received.is_coalesced());
  EXPECT_EQ(received._nnz(), 3);
  expectSame(uncoalesced, received);
  expectSame(at::zeros({4, 4}).to_sparse(), travel(at::zeros({4, 4}).to_sparse()));
  expectSame(dense.to_sparse_csr(), travel(dense.to_sparse_csr()));
  expectSame(dense.to_sparse_csc(), travel(dense.to_sparse_csc()));
  expectSame(dense.to_sparse_bsr({2, 3}), travel(dense.to_sparse_bsr({2, 3})));
  expectSame(dense.to_sparse_bsc({4, 2}), travel(dense.to_sparse_bsc({4, 2})));
  const at::Tensor large = at::rand({1000, 1000}).to_sparse_csr(); // parts as spans
  expectSame(large, travel(large));
}

TEST(TensorCodecTest, QuantizedTensorsArrive) {
  const at::Tensor dense = at::rand({6, 8}) * 10 - 5;
  for (const at::ScalarType dtype : {at::kQInt8, at::kQUInt8, at::kQInt32}) {
    const at::Tensor sent = at::quantize_per_tensor(dense, 0.1, 3, dtype);
    const at::Tensor received = travel(sent);
    expectSame(sent, received);
    EXPECT_EQ(received.q_scale(), 0.1);
    EXPECT_EQ(received.q_zero_point(), 3);
    expectSame(sent.t(), travel(sent.t()));
  }
  const at::Tensor perChannel =
      at::quantize_per_channel(dense, at::rand({8}, at::kDouble) + 0.1, at::arange(8), 1, at::kQInt8);
  const at::Tensor received = travel(perChannel);
  expectSame(perChannel, received);
  EXPECT_EQ(received.q_per_channel_axis(), 1);
  EXPECT_TRUE(received.q_per_channel_scales().equal(perChannel.q_per_channel_scales()));
}

TEST(TensorCodecTest, DtypesWhoseElementsShareBytesArrive) {
  for (const at::ScalarType dtype : {at::kQUInt4x2, at::kQUInt2x4}) {
    for (const int64_t columns : {7, 100'000}) {
      const at::Tensor sent =
          at::quantize_per_channel(at::rand({4, columns}) * 4, at::ones({4}), at::zeros({4}), 0, dtype);
      const size_t bytes = sent.storage().nbytes();
      ASSERT_LT(bytes, sent.numel());
      const at::Tensor received = travel(sent);
      EXPECT_EQ(received.scalar_type(), dtype);
      EXPECT_EQ(received.sizes(), sent.sizes());
      EXPECT_EQ(std::memcmp(received.const_data_ptr(), sent.const_data_ptr(), bytes), 0);
      EXPECT_TRUE(received.q_per_channel_scales().equal(sent.q_per_channel_scales()));
    }
    // For torch the view begins behind the end of its storage, so nothing of it may be read.
    const at::Tensor view = at::quantize_per_tensor(at::ones({4, 8}), 1, 0, dtype).narrow(0, 3, 1);
    ASSERT_GT(view.storage_offset(), view.storage().nbytes());
    const at::Tensor beyond = travel(view);
    EXPECT_EQ(beyond.sizes(), view.sizes());
    EXPECT_EQ(*static_cast<const uint8_t*>(beyond.const_data_ptr()), 0);
  }
}

TEST(TensorCodecTest, BorrowedMemoryIsCopiedAtOnce) {
  std::vector<float> memory(50'000, 1.f);
  const at::Tensor sent = at::from_blob(memory.data(), {50'000});
  const std::unique_ptr<OutgoingMessage> outgoing = encode({sent, sent.narrow(0, 7, 3)});
  std::fill(memory.begin(), memory.end(), 2.f); // as its owner may, once send() has returned
  const std::vector<at::Tensor> received = decode(arrive(*outgoing))->tensors();
  EXPECT_TRUE(received[0].eq(1).all().item<bool>());
  EXPECT_TRUE(received[1].eq(1).all().item<bool>());
}

TEST(TensorCodecTest, ReceivedTensorsCanBeResizedAndWritten) {
  for (const int64_t elements : {10, 100'000}) {
    const at::Tensor received = travel(at::ones({elements}));
    received.resize_({4 * elements});
    received.fill_(2);
    EXPECT_EQ(received.sum().item<double>(), 8. * static_cast<double>(elements));
  }
}

TEST(TensorCodecTest, ThousandsOfTensorsInOneMessage) {
  std::vector<at::Tensor> sent;
  for (int64_t number = 0; number < 5000; ++number) {
    sent.push_back(at::full({number % 7, 3}, number));
  }
  const std::vector<at::Tensor> received = travel(sent);
  ASSERT_EQ(received.size(), sent.size());
  for (size_t number = 0; number < sent.size(); ++number) {
    ASSERT_TRUE(received[number].equal(sent[number])) << number;
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

TEST(TensorCodecTest, ManySmallTensorsArePackedIntoSpansOfOnePiece) {
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

TEST(TensorCodecTest, PackedTensorsAreOnTheirOwnAfterArrival) {
  constexpr int64_t kElements = 8000;
  const uint64_t before = HostPool::instance().statistics().inUseBytes;
  std::vector<at::Tensor> received = travel(numbered(200, kElements));
  EXPECT_EQ(HostPool::instance().statistics().inUseBytes, before) << "a pack ends when it is decoded";
  received[150].resize_({2 * kElements}).fill_(-1);
  received[199].fill_(-1);
  received.resize(150);
  expectNumbered(received, kElements);
}

TEST(TensorCodecTest, PackedTensorsEqualTheSentOnes) {
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

TEST(TensorCodecTest, AMessageHasABoundedNumberOfSpans) {
  std::vector<at::Tensor> sent = numbered(3000, 9000); // 36 KB each, beyond what may be inline
  sent.push_back(at::full({300'000}, 3000, at::kInt)); // these are lent
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

TEST(TensorCodecTest, UnsendableTensorsAreRefusedNamingTheWorker) {
  for (const at::Tensor& tensor : {at::empty({3}, at::kMeta), at::rand({3, 4}).to_mkldnn()}) {
    try {
      (void)encode({tensor});
      ADD_FAILURE() << "was not refused";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("worker 'ps' (rank 3"), std::string::npos) << error.what();
    }
  }
}

// ------------------------------------------------------------------------------------------ malformed bodies of a peer

// Replaces one int64 of the body, which must occur in it exactly once.
void replaceInt(Bytes& body, int64_t from, int64_t to) {
  int found = 0;
  for (size_t at = 0; at + sizeof(from) <= body.size(); ++at) {
    if (std::memcmp(body.data() + at, &from, sizeof(from)) == 0) {
      std::memcpy(body.data() + at, &to, sizeof(to));
      ++found;
    }
  }
  ASSERT_EQ(found, 1);
}

Error decodeError(IncomingMessage incoming) {
  DecodedMessage decoded;
  return decodeMessage(std::move(incoming), {}, decoded);
}

TEST(TensorCodecTest, SparseIndicesOutsideTheTensorAreRefused) {
  const at::Tensor coo = at::sparse_coo_tensor(
      at::tensor({1234567, 7654321}, at::kLong).reshape({2, 1}), at::tensor({1.0}), {10'000'000, 10'000'000});
  for (const int64_t lie : {int64_t{20'000'000}, int64_t{-1}}) {
    IncomingMessage incoming = arrive(*encode({coo}));
    replaceInt(incoming.eagerBody, 1234567, lie);
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << lie;
  }
  const at::Tensor csr = at::sparse_csr_tensor(
      at::tensor({0, 1, 1}, at::kLong),
      at::tensor({7654321}, at::kLong),
      at::tensor({1.0f}),
      {2, 10'000'000},
      at::TensorOptions().layout(at::kSparseCsr));
  for (const int64_t lie : {int64_t{20'000'000}, int64_t{-1}}) {
    IncomingMessage incoming = arrive(*encode({csr}));
    replaceInt(incoming.eagerBody, 7654321, lie);
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << lie;
  }
}

// The first tensor record lies behind the prefix and one storage record for each storage.
wire::TensorRecord& firstRecord(IncomingMessage& incoming) {
  wire::BodyPrefix prefix;
  std::memcpy(&prefix, incoming.eagerBody.data(), sizeof(prefix));
  return *reinterpret_cast<wire::TensorRecord*>(
      incoming.eagerBody.data() + sizeof(prefix) + prefix.storages * sizeof(wire::StorageRecord));
}

TEST(TensorCodecTest, RecordsThatTorchCouldNotHaveMadeAreRefused) {
  {
    IncomingMessage incoming = arrive(*encode({at::zeros({4}, at::kChar)}));
    firstRecord(incoming).dtype = static_cast<uint8_t>(at::kQInt8);
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "a quantized dtype without a quantizer";
  }
  {
    IncomingMessage incoming = arrive(*encode({at::quantize_per_tensor(at::rand({4}), 0.1, 0, at::kQInt8)}));
    firstRecord(incoming).dtype = static_cast<uint8_t>(at::kChar);
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "a quantizer without a quantized dtype";
  }
  {
    IncomingMessage incoming = arrive(*encode({at::zeros({4}, at::kLong)}));
    firstRecord(incoming).flags = wire::kRequiresGrad;
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "integers have no gradient";
  }
  {
    IncomingMessage incoming = arrive(*encode({at::zeros({4})}));
    firstRecord(incoming).dtype = 200;
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "no such dtype";
  }
  {
    IncomingMessage incoming = arrive(*encode({at::zeros({4})}));
    firstRecord(incoming).dtype = static_cast<uint8_t>(at::kInt);
    firstRecord(incoming).itemBytes = 2;
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "items of another size";
  }
  for (const int64_t axis : {int64_t{2}, int64_t{-1}, int64_t{1}, int64_t{1} << 40}) { // of axis 1 it has 8, not 6
    IncomingMessage incoming =
        arrive(*encode({at::quantize_per_channel(at::rand({6, 8}), at::ones({6}), at::zeros({6}), 0, at::kQInt8)}));
    firstRecord(incoming).axis = axis;
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "scales for axis " << axis;
  }
}

// Any bytes from a peer give an error, or tensors that can be read (a sanitizer checks this).
TEST(TensorCodecTest, DamagedBodiesNeverLeadOutsideMemory) {
  std::mt19937 random(3);
  const at::Tensor dense = at::rand({4, 6});
  const std::vector<at::Tensor> sent = {
      dense,
      dense.t(),
      at::Tensor(),
      dense.to_sparse(),
      dense.to_sparse_csr(),
      at::quantize_per_tensor(dense, 0.1, 3, at::kQInt8),
      at::rand({3}, at::kComplexFloat).conj(),
      at::rand({20'000})};
  const std::unique_ptr<OutgoingMessage> outgoing = encode(sent);
  size_t refused = 0;
  for (int round = 0; round < 4000; ++round) {
    IncomingMessage incoming = arrive(*outgoing);
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t at = random() % incoming.eagerBody.size();
      incoming.eagerBody.data()[at] = static_cast<std::byte>(random() % 4 == 0 ? random() : random() % 8);
    }
    DecodedMessage decoded;
    if (decodeMessage(std::move(incoming), {}, decoded)) {
      ++refused;
      continue;
    }
    for (const at::Tensor& tensor : decoded.message->tensors()) {
      if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() && tensor.numel() < 100'000) {
        (void)tensor.detach().clone();
      }
    }
  }
  EXPECT_GT(refused, 1000u);
}

} // namespace
} // namespace torch_ucx_rpc
