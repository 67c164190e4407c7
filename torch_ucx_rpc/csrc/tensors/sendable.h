#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

// Bytes from the first to just past the last element that the strides reach. Elements below a byte count as a byte.
uint64_t extentBytes(const at::Tensor& tensor);

// Says that a strided tensor reaches beyond the end of its storage, and the cure. FSDP and others free storages by
// resize_(), and their tensors keep their sizes. Returns nothing if all bytes are there, and for a tensor that stands
// for another one. The text continues a sentence that begins with "it".
std::optional<std::string> whyBeyondStorage(const at::Tensor& tensor);

// Says why a defined tensor cannot be read: its kind, and the cure. Returns nothing for zero tensors, for strided
// tensors whose storage has memory for all elements, and for torch's sparse tensors, whose parts are checked one by
// one.
std::optional<std::string> whyUnsendable(const at::Tensor& tensor);

} // namespace torch_ucx_rpc
