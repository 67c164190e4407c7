// The values of tensors arrive as they were sent, and hostile bodies are refused.

#include "tensors/tensor_codec.h"

#include "codec.h"

#include <ATen/ATen.h>
#include <ATen/native/quantized/AffineQuantizerBase.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using rpc::MessageType;

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
    // For torch the view begins beyond the end of its storage, so nothing may be read.
    const at::Tensor view = at::quantize_per_tensor(at::ones({4, 8}), 1, 0, dtype).narrow(0, 3, 1);
    ASSERT_GT(view.storage_offset(), view.storage().nbytes());
    const at::Tensor beyond = travel(view);
    EXPECT_EQ(beyond.sizes(), view.sizes());
    EXPECT_EQ(*static_cast<const uint8_t*>(beyond.const_data_ptr()), 0);
  }
}

TEST(TensorCodecTest, ThousandsOfTensorsArriveInOneMessage) {
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

// The first tensor record comes after the prefix and the storage records.
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
  for (const int64_t axis : {int64_t{2}, int64_t{-1}, int64_t{1}, int64_t{1} << 40}) { // axis 1 has 8, not 6
    IncomingMessage incoming =
        arrive(*encode({at::quantize_per_channel(at::rand({6, 8}), at::ones({6}), at::zeros({6}), 0, at::kQInt8)}));
    firstRecord(incoming).axis = axis;
    EXPECT_EQ(decodeError(std::move(incoming)).code(), ErrorCode::kProtocol) << "scales for axis " << axis;
  }
}

// Any bytes from a peer give an error, or tensors that can be read. A sanitizer checks the reads.
TEST(TensorCodecTest, DamagedBodiesCauseNoReadOutsideMemory) {
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
