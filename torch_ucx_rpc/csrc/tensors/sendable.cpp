#include "tensors/sendable.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <c10/util/StringUtil.h>

namespace torch_ucx_rpc {

namespace {

using c10::DispatchKey;

// Tensors of these kinds stand for other tensors, and have no memory that their sizes describe.
constexpr c10::DispatchKeySet kWrappers{
    DispatchKey::Functionalize,
    DispatchKey::Batched,
    DispatchKey::FuncTorchBatched,
    DispatchKey::BatchedNestedTensor,
    DispatchKey::FuncTorchGradWrapper,
    DispatchKey::NestedTensor};

// Explains a tensor with one of these keys, which stands for other tensors.
std::string whyWrapped(c10::DispatchKeySet keys) {
  if (keys.has(DispatchKey::NestedTensor)) {
    return "is a nested tensor; send tensor.unbind(), or in Python a nested tensor of layout torch.jagged";
  }
  if (keys.has(DispatchKey::Functionalize)) {
    return "is functionalized and has no memory of its own; send torch._from_functional_tensor(tensor), after "
           "torch._sync(tensor)";
  }
  return "belongs to a transform of torch.func (vmap, grad, jvp) and has no memory of its own; make the call outside "
         "of the transform";
}

std::string whyWithoutMemory() {
  return "has no memory of its own (it is a fake tensor, or a subclass that wraps other tensors); send the tensors "
         "that it stands for";
}

// How many elements share a byte.
uint64_t elementsPerByte(at::ScalarType dtype) {
  return dtype == at::kQUInt4x2 ? 2 : dtype == at::kQUInt2x4 ? 4 : 1;
}

// Counts the elements of a storage up to the last one that a tensor reaches, if the tensor begins at the storage's
// element `first`. Empty if the number overflows.
std::optional<uint64_t> elementsReached(const at::Tensor& tensor, int64_t first) {
  int64_t last = first;
  bool isTooMuch = first < 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) {
      return 0;
    }
    int64_t step = 0;
    isTooMuch = isTooMuch || __builtin_mul_overflow(tensor.size(dim) - 1, tensor.stride(dim), &step) ||
        __builtin_add_overflow(last, step, &last);
  }
  if (isTooMuch) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(last) + 1;
}

// Distinguishes torch's own sparse tensors from subclasses in Python, which may claim any layout. torch's functions for
// these layouts would take a subclass for one of theirs.
bool isTorchsSparse(const c10::TensorImpl* impl) {
  return dynamic_cast<const at::SparseTensorImpl*>(impl) != nullptr ||
      dynamic_cast<const at::SparseCsrTensorImpl*>(impl) != nullptr;
}

} // namespace

uint64_t extentBytes(const at::Tensor& tensor) {
  return elementsReached(tensor, 0).value_or(0) * tensor.dtype().itemsize();
}

std::optional<std::string> whyBeyondStorage(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (!impl->unsafe_storage() || impl->key_set().has_any(kWrappers) || impl->has_symbolic_sizes_strides()) {
    return std::nullopt; // it has no bytes, or they belong to another tensor
  }
  const auto present = impl->unsafe_storage().sym_nbytes().maybe_as_int();
  const std::optional<uint64_t> elements = elementsReached(tensor, tensor.storage_offset());
  const uint64_t perByte = elementsPerByte(tensor.scalar_type());
  uint64_t needed = 0;
  const bool isKnown = elements &&
      !__builtin_mul_overflow((*elements + perByte - 1) / perByte, uint64_t{tensor.dtype().itemsize()}, &needed);
  if (isKnown && present && needed <= static_cast<uint64_t>(*present)) {
    return std::nullopt;
  }
  return c10::str(
      "reaches beyond its storage, which has ",
      present.value_or(0),
      " bytes",
      isKnown ? c10::str(" of ", needed) : "",
      " (freed or shrunk by resize_()); fill the storage again before the call, as FSDP.summon_full_params() does");
}

std::optional<std::string> whyUnsendable(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has_any(kWrappers)) {
    return whyWrapped(impl->key_set());
  }
  switch (impl->layout()) {
    case at::kStrided:
      break;
    case at::kSparse:
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return isTorchsSparse(impl) ? std::nullopt : std::optional(whyWithoutMemory());
    default:
      return c10::str("has the layout ", impl->layout(), "; convert it first, e.g. tensor.to_dense()");
  }
  if (impl->is_meta()) {
    return "is on the meta device and has no values; send its shape and dtype, or a tensor that has values";
  }
  if (tensor._is_zerotensor()) {
    return std::nullopt; // its elements need no memory
  }
  const c10::Storage& storage = impl->unsafe_storage();
  if (!storage || (tensor.is_quantized() && dynamic_cast<const at::QTensorImpl*>(impl) == nullptr)) {
    return whyWithoutMemory();
  }
  // data() may throw for a fake tensor.
  const bool hasMemory = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
  if (impl->has_symbolic_sizes_strides() || (!hasMemory && storage.sym_nbytes().maybe_as_int() != 0)) {
    return whyWithoutMemory();
  }
  return whyBeyondStorage(tensor);
}

} // namespace torch_ucx_rpc
