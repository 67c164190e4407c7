#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

// The number of bytes from the first element to the end of the last one that the strides reach. An element smaller than
// a byte counts as a byte.
uint64_t extentBytes(const at::Tensor& tensor);

// If a strided tensor reaches beyond the end of its storage, says so and names the cure. FSDP and others free storages
// by resize_(), and their tensors keep their sizes. Returns nothing if all bytes are there, and for a tensor that
// stands for another one. The text continues a sentence that begins with "it".
std::optional<std::string> whyBeyondStorage(const at::Tensor& tensor);

// If a defined tensor cannot be read, names its kind and the cure. Returns nothing for zero tensors, for strided
// tensors whose storage has memory for all elements, and for torch's sparse tensors, whose parts are checked one by
// one.
std::optional<std::string> whyUnsendable(const at::Tensor& tensor);

} // namespace torch_ucx_rpc
