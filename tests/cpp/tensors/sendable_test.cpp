// The tensors that the encoder refuses, and its errors. The calling thread's modes do not affect the codec.

#include "tensors/sendable.h"

#include "codec.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using rpc::MessageType;

std::string refusal(std::vector<at::Tensor> tensors, MessageType type = MessageType::PYTHON_CALL) {
  try {
    (void)encode(std::move(tensors), {'p'}, type);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "was not refused";
}

void expectText(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// Resizes the storage as untyped_storage().resize_(bytes) does.
at::Tensor withStorageOf(at::Tensor tensor, int64_t bytes) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
  if (bytes != 0) {
    std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(bytes));
  return tensor;
}

constexpr int64_t kSizes[] = {1000, 1'000'000}; // in the body, and lent

TEST(SendableTest, FreedAndShrunkStoragesAreRefused) {
  for (const int64_t size : kSizes) {
    const std::string freed = "reaches beyond its storage, which has 0 bytes of ";
    expectText(refusal({withStorageOf(at::zeros({size}), 0)}), freed + std::to_string(4 * size));
    expectText(refusal({withStorageOf(at::zeros({size}).narrow(0, 10, 20), 0)}), freed + "120");
    expectText(refusal({withStorageOf(at::zeros({size}).slice(0, 0, size, 7), 0)}), freed);
    expectText(refusal({withStorageOf(at::zeros({size}, at::kComplexFloat).conj(), 0)}), freed);
    expectText(refusal({withStorageOf(at::zeros({size}), 400)}), "which has 400 bytes of ");
    expectText(refusal({withStorageOf(at::zeros({size}), 4 * size - 1)}), "reaches beyond its storage");
    expectText(refusal({withStorageOf(at::zeros({size}).narrow(0, 990, 10), 400)}), "has 400 bytes of 4000");
    const at::Tensor quantized = at::quantize_per_tensor(at::zeros({size}), 0.1, 0, at::kQInt8);
    expectText(refusal({withStorageOf(quantized, 0)}), freed + std::to_string(size));
  }
}

TEST(SendableTest, ViewWithinAShrunkStorageArrives) {
  for (const int64_t size : kSizes) {
    const at::Tensor base = withStorageOf(at::ones({size}), 4 * size - 400);
    const at::Tensor view = base.narrow(0, 0, size - 100).fill_(7);
    EXPECT_TRUE(travel(view).equal(view));
  }
}

TEST(SendableTest, TensorsWithoutElementsNeedNoMemory) {
  EXPECT_EQ(travel(withStorageOf(at::zeros({10}).narrow(0, 5, 0), 0)).sizes(), at::IntArrayRef({0}));
  EXPECT_EQ(travel(withStorageOf(at::zeros({3, 0, 2}), 0)).sizes(), at::IntArrayRef({3, 0, 2}));
}

TEST(SendableTest, SizesThatOverflowAreRefused) {
  at::Tensor tensor = at::zeros({10});
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  const std::pair<int64_t, int64_t> shapes[] = {{kHuge, kHuge}, {3, kHuge}, {kHuge, 1}};
  for (const auto& [size, stride] : shapes) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        c10::IntArrayRef({size}), c10::IntArrayRef({stride}), /*storage_offset=*/2);
    expectText(refusal({tensor}), "reaches beyond its storage, which has 40 bytes");
  }
}

TEST(SendableTest, ElementsBelowAByteAreCountedAsTheyAreStored) {
  const at::Tensor packed = at::quantize_per_channel(at::rand({5, 7}), at::ones({5}), at::ones({5}), 0, at::kQUInt4x2);
  ASSERT_LT(packed.storage().nbytes(), 35u);
  EXPECT_EQ(travel(packed).sizes(), packed.sizes());
  expectText(refusal({withStorageOf(packed, 3)}), "which has 3 bytes of 18");
}

TEST(SendableTest, KindsWithoutMemoryAreRefusedWithTheirCure) {
  namespace functional = at::functionalization::impl;
  for (const int64_t size : kSizes) {
    expectText(refusal({at::empty({size}, at::kMeta)}), "is on the meta device and has no values; send its shape");
    expectText(refusal({at::rand({size}).to_mkldnn()}), "has the layout Mkldnn; convert it first, e.g. ");
    expectText(refusal({functional::to_functional_tensor(at::rand({size}))}), "is functionalized");
    expectText(
        refusal({at::addBatchDim(at::rand({3, size}), /*level=*/1, /*dim=*/0)}),
        "belongs to a transform of torch.func");
    const std::vector<at::Tensor> rows = {at::rand({size}), at::rand({3})};
    expectText(refusal({at::_nested_tensor_from_tensor_list(rows)}), "is a nested tensor; send tensor.unbind()");
    // torch.Tensor._make_wrapper_subclass() makes such a tensor.
    expectText(
        refusal({at::for_blob(nullptr, {size}).target_device(at::kCPU).options(at::kFloat).make_tensor()}),
        "has no memory of its own");
  }
}

TEST(SendableTest, PartsOfATensorAreNamed) {
  at::Tensor coo = at::eye(10).to_sparse();
  withStorageOf(coo._values(), 0);
  expectText(refusal({at::ones({1}), coo}), "the values of tensor 2 of 2 in this call to worker 'ps' (rank 3");
  at::Tensor csr = at::eye(10).to_sparse_csr();
  withStorageOf(csr.col_indices(), 0);
  expectText(refusal({csr}), "the plain indices of tensor 1 of 1");
  const at::Tensor perChannel = at::quantize_per_channel(at::rand({5}), at::ones({5}), at::ones({5}), 0, at::kQInt8);
  withStorageOf(perChannel.q_per_channel_scales(), 0);
  expectText(refusal({perChannel}), "the scales of tensor 1 of 1");
}

TEST(SendableTest, RefusalNamesThePlaceAndTheMessage) {
  const at::Tensor freed = withStorageOf(at::zeros({10}), 0);
  expectText(
      refusal({at::zeros({1}), at::Tensor(), freed, at::zeros({1})}),
      "cannot send tensor 3 of 4 in this call to worker 'ps' (rank 3");
  expectText(refusal({freed}, MessageType::PYTHON_RET), "cannot send tensor 1 of 1 in this answer to worker 'ps'");
}

TEST(SendableTest, ZeroTensorsArriveAsZeros) {
  for (const int64_t size : kSizes) {
    EXPECT_TRUE(travel(at::_efficientzerotensor({size})).equal(at::zeros({size})));
  }
}

// ------------------------------------------------------------------------------------------------------------- modes

// Returns tensors whose encoding or decoding runs operators.
std::vector<at::Tensor> manyKinds() {
  const at::Tensor dense = at::arange(24.).remainder(5).reshape({4, 6});
  return {
      dense,
      at::rand({300'000}),
      at::rand({300'000}).slice(0, 0, 300'000, 7),
      at::rand({5}, at::kComplexFloat).conj(),
      dense._neg_view(),
      dense.to_sparse(),
      dense.to_sparse_csr(),
      at::_efficientzerotensor({5}),
      at::quantize_per_tensor(dense, 0.1, 3, at::kQInt8),
      at::quantize_per_channel(dense, at::ones({4}), at::zeros({4}), 0, at::kQUInt4x2),
      dense.clone().set_requires_grad(true)};
}

void expectOrdinary(const at::Tensor& sent, const at::Tensor& received) {
  ASSERT_TRUE(received.defined());
  EXPECT_FALSE(received.is_inference());
  EXPECT_FALSE(at::functionalization::impl::isFunctionalTensor(received));
  EXPECT_EQ(received.layout(), sent.layout());
  EXPECT_EQ(received.dtype(), sent.dtype());
  EXPECT_EQ(received.requires_grad(), sent.requires_grad());
  EXPECT_TRUE(received.is_leaf());
  const auto plain = [](const at::Tensor& tensor) {
    const at::Tensor dense = tensor.layout() == at::kStrided ? tensor.detach() : tensor.detach().to_dense();
    return dense.is_quantized() ? dense.dequantize() : dense;
  };
  EXPECT_TRUE(plain(received).equal(plain(sent)));
}

void expectNoEffect(const std::function<void(const std::function<void()>&)>& within) {
  for (const at::Tensor& sent : manyKinds()) {
    SCOPED_TRACE(sent.toString());
    at::Tensor received;
    within([&] { received = travel(sent); });
    expectOrdinary(sent, received);
  }
}

TEST(CodecModesTest, InferenceModeHasNoEffect) {
  expectNoEffect([](const std::function<void()>& body) {
    const c10::InferenceMode mode;
    body();
    EXPECT_TRUE(c10::InferenceMode::is_enabled()) << "the mode is as it was";
    EXPECT_TRUE(at::ones({1}).is_inference());
  });
  EXPECT_FALSE(c10::InferenceMode::is_enabled());
}

TEST(CodecModesTest, FunctionalizationHasNoEffect) {
  expectNoEffect([](const std::function<void()>& body) {
    const c10::impl::IncludeDispatchKeyGuard mode(c10::DispatchKey::Functionalize);
    body();
    EXPECT_TRUE(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Functionalize)) << "the mode is as it was";
  });
}

TEST(CodecModesTest, AutocastHasNoEffect) {
  expectNoEffect([](const std::function<void()>& body) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    body();
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU)) << "the mode is as it was";
    at::autocast::set_autocast_enabled(at::kCPU, false);
  });
}

// The kernel of this test runs by the same dispatch key as a Python mode, such as FakeTensorMode.
TEST(CodecModesTest, PythonsModesSeeNoOperator) {
  expectNoEffect([](const std::function<void()>& body) {
    const c10::impl::IncludeDispatchKeyGuard python(c10::DispatchKey::Python);
    const c10::impl::IncludeDispatchKeyGuard snapshot(c10::DispatchKey::PythonTLSSnapshot);
    EXPECT_ANY_THROW((void)at::ones({1})) << "there is no Python here";
    body();
  });
}

} // namespace
} // namespace torch_ucx_rpc
