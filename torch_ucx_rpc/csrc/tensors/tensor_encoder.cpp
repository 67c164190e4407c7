#include "tensors/device_copy.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

using wire::BodyWriter;
using wire::kNowhere;
using wire::Layout;
using wire::TensorRecord;

// A storage up to this size rides in the body: one copy more on each side costs less than a rendezvous of its own.
constexpr uint64_t kInlineStorageBytes = 32 * 1024;
// Likewise for the pickled payload.
constexpr uint64_t kInlinePayloadBytes = 64 * 1024;
// A view is packed where that at least halves what travels.
constexpr int64_t kPackingGain = 2;

// What the message lends to the transport: torch's message itself, and copies made for packing.
class LentMessage final : public Lender {
 public:
  explicit LentMessage(c10::intrusive_ptr<Message> message) : message_(std::move(message)) {}
  bool mayRunUserCode() const override {
    return !message_->tensors().empty(); // a tensor may own its Python object
  }
  void keep(at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
  }

 private:
  const c10::intrusive_ptr<Message> message_;
  std::vector<at::Tensor> tensors_;
};

// The memory that one strided tensor reaches.
struct Region {
  c10::Device device = c10::kCPU;
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  const std::byte* storageBegin = nullptr; // of the torch storage it lies in
  uint32_t storage = kNowhere; // filled once storages are numbered
};

// A record under construction; its region is numbered when all tensors are known.
struct PlannedTensor {
  TensorRecord record{};
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool isChild = false;
  bool hasRegion = false;
  Region region;
};

// Builds the plan for all tensors of a message, then the body.
class Encoder {
 public:
  Encoder(c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport& transport)
      : message_(message),
        to_(to),
        deviceMap_(deviceMap),
        transport_(transport),
        lent_(std::make_unique<LentMessage>(std::move(message))) {}

  std::unique_ptr<OutgoingMessage> encode() {
    auto outgoing = std::make_unique<OutgoingMessage>();
    BodyWriter writer(static_cast<uint32_t>(message_->type()));
    const std::vector<char>& payload = message_->payload();
    if (payload.size() <= kInlinePayloadBytes) {
      writer.setInlinePayload(payload);
    } else {
      writer.setPayloadSpan(payload.size(), addSpan(*outgoing, payload.data(), payload.size()));
    }
    if (!message_->tensors().empty()) {
      for (const at::Tensor& tensor : message_->tensors()) {
        plan(tensor, false);
      }
      numberStorages(writer, *outgoing);
      for (PlannedTensor& tensor : tensors_) {
        tensor.record.storage = tensor.region.storage;
        writer.addTensor(tensor.record, tensor.sizes, tensor.strides, tensor.isChild);
      }
    }
    outgoing->body = writer.finish();
    outgoing->before = DeviceWork(currentStreams(devices_));
    outgoing->lender = std::move(lent_);
    return outgoing;
  }

 private:
  static uint32_t addSpan(
      OutgoingMessage& outgoing,
      const void* data,
      uint64_t bytes,
      c10::Device from = c10::kCPU,
      c10::Device to = c10::kCPU) {
    outgoing.spans.push_back({{static_cast<const std::byte*>(data), bytes}, from, to});
    return static_cast<uint32_t>(outgoing.spans.size() - 1);
  }

  uint32_t addStorageSpan(
      OutgoingMessage& outgoing, const std::byte* begin, uint64_t bytes, c10::Device from, c10::Device to) {
    if (from.is_cpu() || !to_.isNeighbour.load() || transport_.canShare(begin)) {
      return addSpan(outgoing, begin, bytes, from, to);
    }
    const at::Tensor staged = stageBytes(begin, bytes, from);
    lent_->keep(staged);
    outgoing.stagedBytes += bytes;
    return addSpan(outgoing, staged.const_data_ptr(), bytes, c10::kCPU, to);
  }

  PlannedTensor& add(Layout layout, const at::Tensor& tensor, bool isChild) {
    PlannedTensor& planned = tensors_.emplace_back();
    planned.isChild = isChild;
    planned.record.layout = layout;
    planned.record.storage = kNowhere;
    planned.record.dtype = static_cast<uint8_t>(tensor.scalar_type());
    planned.record.itemBytes = static_cast<uint8_t>(tensor.dtype().itemsize());
    planned.record.flags = tensor.requires_grad() ? wire::kRequiresGrad : 0;
    planned.sizes = tensor.sizes().vec();
    return planned;
  }

  void plan(const at::Tensor& tensor, bool isChild) {
    if (!tensor.defined()) {
      PlannedTensor& planned = tensors_.emplace_back();
      planned.record.layout = Layout::kUndefined;
      planned.record.storage = kNowhere;
      return;
    }
    (void)targetOf(tensor.device()); // refuses
    switch (tensor.layout()) {
      case at::kStrided:
        if (tensor.is_quantized()) {
          planQuantized(tensor);
        } else {
          planMemory(add(Layout::kStrided, tensor, isChild), tensor);
        }
        return;
      case at::kSparse:
        planCoo(tensor);
        return;
      case at::kSparseCsr:
        return planCompressed(Layout::kSparseCsr, tensor, tensor.crow_indices(), tensor.col_indices());
      case at::kSparseCsc:
        return planCompressed(Layout::kSparseCsc, tensor, tensor.ccol_indices(), tensor.row_indices());
      case at::kSparseBsr:
        return planCompressed(Layout::kSparseBsr, tensor, tensor.crow_indices(), tensor.col_indices());
      case at::kSparseBsc:
        return planCompressed(Layout::kSparseBsc, tensor, tensor.ccol_indices(), tensor.row_indices());
      default:
        TORCH_CHECK(
            false,
            "the UCX RPC backend cannot send a tensor of layout ",
            tensor.layout(),
            " to ",
            to_.describe(),
            "; convert it first, e.g. tensor.to_dense().");
    }
  }

  // Where a tensor on this device arrives.
  c10::Device targetOf(c10::Device device) const {
    const auto entry = deviceMap_.find(device);
    if (entry != deviceMap_.end()) {
      return entry->second;
    }
    // Half of it is TensorPipe's own text, which programs and PyTorch's tests look for.
    TORCH_CHECK(
        device.is_cpu(),
        "this message to ",
        to_.describe(),
        " has a tensor on ",
        device,
        "; UCX's as well as the TensorPipe RPC backend only supports CPU tensors by default. Move it to the CPU first, e.g. "
        "tensor.cpu(), or say where it is to arrive, by ",
        message_->isRequest() ? "" : "the caller's ",
        "`set_device_map` on `TensorPipeRpcBackendOptions` or UcxRpcBackendOptions: ",
        message_->isRequest() ? "Request" : "Response",
        " device mapping is not available for ",
        device,
        ".");
    return device;
  }

  void planCoo(const at::Tensor& tensor) {
    PlannedTensor& planned = add(Layout::kSparseCoo, tensor, false);
    planned.record.children = 2;
    planned.record.flags |= tensor.is_coalesced() ? wire::kCoalesced : 0;
    plan(tensor._indices(), true);
    plan(tensor._values().detach(), true);
  }

  void planCompressed(Layout layout, const at::Tensor& tensor, const at::Tensor& compressed, const at::Tensor& plain) {
    add(layout, tensor, false).record.children = 3;
    plan(compressed, true);
    plan(plain, true);
    plan(tensor.values().detach(), true);
  }

  void planQuantized(const at::Tensor& tensor) {
    switch (tensor.qscheme()) {
      case at::kPerTensorAffine: {
        PlannedTensor& planned = add(Layout::kQuantizedPerTensor, tensor, false);
        planned.record.scale = tensor.q_scale();
        planned.record.zeroPoint = tensor.q_zero_point();
        planMemory(planned, tensor);
        return;
      }
      case at::kPerChannelAffine:
      case at::kPerChannelAffineFloatQParams: {
        PlannedTensor& planned = add(Layout::kQuantizedPerChannel, tensor, false);
        planned.record.axis = tensor.q_per_channel_axis();
        planned.record.children = 2;
        planMemory(planned, tensor);
        plan(tensor.q_per_channel_scales(), true);
        plan(tensor.q_per_channel_zero_points(), true);
        return;
      }
      default:
        TORCH_CHECK(
            false,
            "the UCX RPC backend cannot send a tensor quantized with ",
            toString(tensor.qscheme()),
            " to ",
            to_.describe(),
            "; dequantize it first.");
    }
  }

  // Bytes from the first to just past the last element that the strides reach.
  static uint64_t extentBytes(const at::Tensor& tensor) {
    uint64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) == 0) {
        return 0;
      }
      last += static_cast<uint64_t>((tensor.size(dim) - 1) * tensor.stride(dim));
    }
    return (last + 1) * tensor.dtype().itemsize();
  }

  // Elements that share bytes: torch counts a byte for each, which is more than their storage has.
  at::Tensor padded(const at::Tensor& tensor, uint64_t bytes) const {
    TORCH_CHECK(
        tensor.is_cpu(),
        "the UCX RPC backend cannot send a tensor of dtype ",
        tensor.scalar_type(),
        " on ",
        tensor.device(),
        " to ",
        to_.describe(),
        "; dequantize it first.");
    at::Tensor memory = at::zeros({static_cast<int64_t>(bytes)}, at::kByte);
    const uint64_t present = tensor.storage().nbytes() - static_cast<uint64_t>(tensor.storage_offset());
    std::memcpy(memory.mutable_data_ptr(), tensor.const_data_ptr(), std::min(bytes, present));
    return memory;
  }

  void planMemory(PlannedTensor& planned, const at::Tensor& tensor) {
    at::Tensor memory = tensor;
    planned.record.flags |= (tensor.is_conj() ? wire::kConjugate : 0) | (tensor.is_neg() ? wire::kNegative : 0);

    const uint64_t extent = extentBytes(tensor);
    const uint64_t needed = static_cast<uint64_t>(tensor.numel()) * tensor.dtype().itemsize();
    // Borrowed memory has no owner that could keep it alive until UCX has sent it.
    const bool isBorrowed = extent != 0 && tensor.storage().data_ptr().get_context() == nullptr;
    const bool hasHoles = extent > kInlineStorageBytes && needed * kPackingGain <= extent;
    if (isBorrowed || hasHoles || tensor._is_zerotensor()) {
      at::Tensor raw = tensor.detach();
      raw = raw.is_conj() ? raw.conj() : raw; // the lazy bits travel as flags, the memory as it is
      raw = raw.is_neg() ? raw._neg_view() : raw;
      memory = raw.clone(hasHoles ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve);
      lent_->keep(memory);
    }
    planned.strides = memory.strides().vec();
    if (!tensor.is_cpu()) {
      if (std::find(devices_.begin(), devices_.end(), tensor.device()) == devices_.end()) {
        devices_.push_back(tensor.device());
      }
      // The message keeps it until UCX has read it, but a copy for a call to oneself is only in the stream when the message is over.
      recordOnCurrentStream(memory.storage().data_ptr());
    }
    if (tensor.scalar_type() == at::kQUInt4x2 || tensor.scalar_type() == at::kQUInt2x4) {
      memory = padded(memory, extentBytes(memory));
      lent_->keep(memory);
    }
    const auto* begin = static_cast<const std::byte*>(memory.const_data_ptr());
    planned.region = {
        memory.device(),
        begin,
        begin + extentBytes(memory),
        static_cast<const std::byte*>(memory.storage().data_ptr().get()),
        kNowhere};
    planned.hasRegion = true;
  }

  // Regions that overlap become one storage, so that tensors which share memory share it after arrival too. Addresses tell:
  // live tensors overlap only where they share a storage.
  void numberStorages(BodyWriter& writer, OutgoingMessage& outgoing) {
    std::vector<PlannedTensor*> byAddress;
    for (PlannedTensor& tensor : tensors_) {
      if (tensor.hasRegion) {
        byAddress.push_back(&tensor);
      }
    }
    // Addresses of different devices have nothing to do with each other.
    std::stable_sort(byAddress.begin(), byAddress.end(), [](const PlannedTensor* a, const PlannedTensor* b) {
      const auto key = [](const Region& region) {
        return std::make_tuple(region.device.type(), region.device.index(), region.begin);
      };
      return key(a->region) < key(b->region);
    });
    for (size_t first = 0; first < byAddress.size();) {
      const c10::Device device = byAddress[first]->region.device;
      const std::byte* const start = byAddress[first]->region.begin;
      const std::byte* end = byAddress[first]->region.end;
      size_t next = first + 1;
      while (next < byAddress.size() && byAddress[next]->region.device == device &&
             byAddress[next]->region.begin < end) {
        end = std::max(end, byAddress[next]->region.end);
        ++next;
      }
      // Views of different dtypes may start at bytes that are no whole number of elements apart; seen from the start of
      // their torch storage they always are.
      const auto overlapping = std::span(byAddress).subspan(first, next - first);
      const bool isWhole = std::all_of(overlapping.begin(), overlapping.end(), [start](const PlannedTensor* tensor) {
        return (tensor->region.begin - start) % tensor->record.itemBytes == 0;
      });
      const std::byte* const begin = isWhole ? start : byAddress[first]->region.storageBegin;
      const auto bytes = static_cast<uint64_t>(end - begin);
      const c10::Device target = targetOf(device);
      const auto targetType = static_cast<int8_t>(target.type());
      const bool isInline =
          bytes <= (device.is_cpu() ? kInlineStorageBytes : 0); // the body is made now, and on the CPU
      const uint32_t storage = isInline
          ? writer.addInlineStorage(begin, bytes, targetType, target.index())
          : writer.addSpanStorage(
                bytes, addStorageSpan(outgoing, begin, bytes, device, target), targetType, target.index());
      for (; first < next; ++first) {
        PlannedTensor& tensor = *byAddress[first];
        tensor.region.storage = storage;
        tensor.record.storageOffset = (tensor.region.begin - begin) / tensor.record.itemBytes;
      }
    }
  }

  const c10::intrusive_ptr<Message> message_;
  const Peer& to_;
  const DeviceMap& deviceMap_;
  const Transport& transport_;
  std::unique_ptr<LentMessage> lent_;
  Devices devices_; // that its tensors are on, besides the CPU
  std::vector<PlannedTensor> tensors_;
};

} // namespace

std::unique_ptr<OutgoingMessage> encodeMessage(
    c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport& transport) {
  return Encoder(std::move(message), to, deviceMap, transport).encode();
}

} // namespace torch_ucx_rpc
