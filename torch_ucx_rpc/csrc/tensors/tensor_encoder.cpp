#include "memory/host_pool.h"
#include "tensors/device_copy.h"
#include "tensors/lent_memory.h"
#include "tensors/outside_modes.h"
#include "tensors/sendable.h"
#include "tensors/storage_plan.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

using wire::BodyWriter;
using wire::kNowhere;
using wire::Layout;

// A payload up to this size travels in the body, like small storages (see kInlineStorageBytes).
constexpr uint64_t kInlinePayloadBytes = 64 * 1024;
// A pack is at most as large as a piece.
constexpr uint64_t kPackBytes = OutgoingMessage::kPieceBytes;
// A view is copied without its holes where that at least halves its bytes.
constexpr int64_t kCompactionGain = 2;

// Owns the memory that a message lends to the transport: torch's message, memory of its tensors, and copies.
class LentMessage final : public Lender {
 public:
  explicit LentMessage(c10::intrusive_ptr<Message> message) : message_(std::move(message)) {}
  bool mayRunUserCode() const override {
    return !message_->tensors().empty(); // a tensor may own its Python object
  }
  void keep(at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
  }
  void keep(LentMemory memory) {
    memory_.push_back(std::move(memory));
  }
  void keep(c10::DataPtr copy) {
    copies_.push_back(std::move(copy));
  }

 private:
  const c10::intrusive_ptr<Message> message_;
  std::vector<at::Tensor> tensors_;
  std::vector<LentMemory> memory_;
  std::vector<c10::DataPtr> copies_;
};

// Builds the plan for all tensors of a message, then the body.
class Encoder {
 public:
  Encoder(c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport* transport)
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
        ++number_;
        plan(tensor, nullptr);
      }
      // The plan points into tensors_, which must not grow any more.
      addStorages(planStorages(tensors_), writer, *outgoing);
      for (PlannedTensor& tensor : tensors_) {
        writer.addTensor(tensor.record, tensor.sizes, tensor.strides, tensor.isChild);
      }
    }
    outgoing->body = writer.finish();
    outgoing->pendingWork = DeviceWork(currentStreams(devices_)); // includes the copies made above
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

  // Whether the transport can send device memory without a copy to a worker that receives it in device memory.
  bool canSend(const PlannedStorage& storage) const {
    if (transport_->deviceMemoryRefusal()) {
      return false;
    }
    // A process cannot map the device memory of a process that it does not find by its id.
    return !to_.isNeighbour.load() || (!to_.isOverNetwork.load() && transport_->canShare(storage.begin, storage.bytes));
  }

  uint32_t addLentSpan(OutgoingMessage& outgoing, const PlannedStorage& storage, c10::Device to) {
    const c10::Device from = storage.device;
    const bool isToOneself = transport_ == nullptr;
    // UCX copies between a device and the host in pieces of 8 KiB, and waits for each of them under the worker lock. So
    // it gets memory of one kind for both sides.
    const bool isBetweenDevices = !from.is_cpu() && !to.is_cpu();
    if (from.is_cpu() || isToOneself || (isBetweenDevices && canSend(storage))) {
      // Most overlapping tensors have one owner, and one loan of it suffices.
      const c10::StorageImpl* last = nullptr;
      for (const PlannedTensor* tensor : storage.tensors) {
        const c10::Storage& owner = tensor->region.owner;
        if (owner.unsafeGetStorageImpl() != last) {
          lent_->keep(LentMemory::lend(owner));
          last = owner.unsafeGetStorageImpl();
        }
      }
      return addSpan(outgoing, storage.begin, storage.bytes, from, to);
    }
    const at::Tensor staged = stageBytes(storage.begin, storage.bytes, from);
    lent_->keep(staged);
    outgoing.stagedBytes += isBetweenDevices ? storage.bytes : 0; // memory for the CPU has to be copied anyway
    return addSpan(outgoing, staged.const_data_ptr(), storage.bytes, c10::kCPU, to);
  }

  // The reference is valid until the next tensor is planned. So a record is filled in before its children are planned.
  PlannedTensor& add(Layout layout, const at::Tensor& tensor, const char* part) {
    PlannedTensor& planned = tensors_.emplace_back();
    planned.isChild = part != nullptr;
    planned.record.layout = layout;
    planned.record.storage = kNowhere;
    planned.record.dtype = static_cast<uint8_t>(tensor.scalar_type());
    planned.record.itemBytes = static_cast<uint8_t>(tensor.dtype().itemsize());
    planned.record.flags = tensor.requires_grad() ? wire::kRequiresGrad : 0;
    planned.sizes = tensor.sizes().vec();
    return planned;
  }

  // `part` names the tensor's part in the message's tensor number_. Null for that tensor itself.
  void plan(const at::Tensor& tensor, const char* part) {
    if (!tensor.defined()) {
      PlannedTensor& planned = tensors_.emplace_back();
      planned.record.layout = Layout::kUndefined;
      planned.record.storage = kNowhere;
      return;
    }
    if (const std::optional<std::string> why = whyUnsendable(tensor)) {
      refuse(part, *why);
    }
    (void)targetOf(tensor.device()); // throws if the device has no target
    switch (tensor.layout()) {
      case at::kStrided:
        if (tensor.is_quantized()) {
          planQuantized(tensor);
        } else {
          planMemory(add(Layout::kStrided, tensor, part), tensor);
        }
        return;
      case at::kSparseCsr:
        return planCompressed(Layout::kSparseCsr, tensor, tensor.crow_indices(), tensor.col_indices());
      case at::kSparseCsc:
        return planCompressed(Layout::kSparseCsc, tensor, tensor.ccol_indices(), tensor.row_indices());
      case at::kSparseBsr:
        return planCompressed(Layout::kSparseBsr, tensor, tensor.crow_indices(), tensor.col_indices());
      case at::kSparseBsc:
        return planCompressed(Layout::kSparseBsc, tensor, tensor.ccol_indices(), tensor.row_indices());
      default: // whyUnsendable() has refused all other layouts
        planCoo(tensor);
    }
  }

  [[noreturn]] void refuse(const char* part, const std::string& why) const {
    TORCH_CHECK(false, "the UCX RPC backend cannot send ", place(part), " to ", to_.describe(), ": it ", why, ".");
  }

  // Names the tensor that is being planned, by its position in the message. Tensors are counted as they were pickled.
  std::string place(const char* part) const {
    return c10::str(
        part == nullptr ? "" : part,
        part == nullptr ? "" : " of ",
        "tensor ",
        number_,
        " of ",
        message_->tensors().size(),
        message_->isRequest() ? " in this call" : " in this answer");
  }

  // The device where a tensor on `device` arrives. Refuses a device without a target.
  c10::Device targetOf(c10::Device device) const {
    const auto entry = deviceMap_.find(device);
    if (entry != deviceMap_.end()) {
      return entry->second;
    }
    // The second half is TensorPipe's own text, which programs and PyTorch's tests look for.
    TORCH_CHECK(
        device.is_cpu(),
        place(nullptr),
        " to ",
        to_.describe(),
        " is on ",
        device,
        "; UCX's as well as the TensorPipe RPC backend only supports CPU tensors by default. Move it to the CPU first, "
        "e.g. tensor.cpu(), or say where it is to arrive, by ",
        message_->isRequest() ? "" : "the caller's ",
        "`set_device_map` on `TensorPipeRpcBackendOptions` or UcxRpcBackendOptions: ",
        message_->isRequest() ? "Request" : "Response",
        " device mapping is not available for ",
        device,
        ".");
    return device;
  }

  void planCoo(const at::Tensor& tensor) {
    PlannedTensor& planned = add(Layout::kSparseCoo, tensor, nullptr);
    planned.record.children = 2;
    planned.record.flags |= tensor.is_coalesced() ? wire::kCoalesced : 0;
    // indices() and values() would refuse a tensor that is not coalesced.
    plan(tensor._indices(), "the indices");
    plan(tensor._values().detach(), "the values"); // detached: requires_grad is the parent's
  }

  void planCompressed(Layout layout, const at::Tensor& tensor, const at::Tensor& compressed, const at::Tensor& plain) {
    add(layout, tensor, nullptr).record.children = 3;
    plan(compressed, "the compressed indices");
    plan(plain, "the plain indices");
    plan(tensor.values().detach(), "the values");
  }

  void planQuantized(const at::Tensor& tensor) {
    switch (tensor.qscheme()) {
      case at::kPerTensorAffine: {
        PlannedTensor& planned = add(Layout::kQuantizedPerTensor, tensor, nullptr);
        planned.record.scale = tensor.q_scale();
        planned.record.zeroPoint = tensor.q_zero_point();
        planMemory(planned, tensor);
        return;
      }
      case at::kPerChannelAffine:
      case at::kPerChannelAffineFloatQParams: {
        PlannedTensor& planned = add(Layout::kQuantizedPerChannel, tensor, nullptr);
        planned.record.axis = tensor.q_per_channel_axis();
        planned.record.children = 2;
        planMemory(planned, tensor);
        plan(tensor.q_per_channel_scales(), "the scales");
        plan(tensor.q_per_channel_zero_points(), "the zero points");
        return;
      }
      default:
        refuse(nullptr, "is quantized with " + toString(tensor.qscheme()) + "; dequantize it first");
    }
  }

  // A copy for elements smaller than a byte. torch counts a whole byte for each, more than their storage has.
  at::Tensor padded(const at::Tensor& tensor, uint64_t bytes) const {
    if (!tensor.is_cpu()) {
      refuse(nullptr, c10::str("has dtype ", tensor.scalar_type(), " on ", tensor.device(), "; dequantize it first"));
    }
    at::Tensor memory = at::zeros({static_cast<int64_t>(bytes)}, at::kByte);
    // torch also counts a byte for each element before the start of a view, so the view may begin beyond the end.
    const uint64_t stored = tensor.storage().nbytes();
    const uint64_t present = stored - std::min<uint64_t>(stored, static_cast<uint64_t>(tensor.storage_offset()));
    std::memcpy(memory.mutable_data_ptr(), tensor.const_data_ptr(), std::min(bytes, present));
    return memory;
  }

  void planMemory(PlannedTensor& planned, const at::Tensor& tensor) {
    at::Tensor memory = tensor;
    planned.record.flags |= (tensor.is_conj() ? wire::kConjugate : 0) | (tensor.is_neg() ? wire::kNegative : 0);

    const uint64_t extent = extentBytes(tensor);
    const uint64_t needed = static_cast<uint64_t>(tensor.numel()) * tensor.dtype().itemsize();
    // Borrowed memory has no owner that could keep it alive until UCX has sent it. A zero tensor has no memory.
    const bool isBorrowed = extent != 0 && !isMemoryOwned(tensor.storage());
    const bool hasHoles = extent > kInlineStorageBytes && needed * kCompactionGain <= extent;
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
      // The message keeps the memory until UCX has read it. For a call to oneself a copy may still wait in the stream
      // when the message is gone.
      recordOnCurrentStream(memory.storage().data_ptr());
    }
    if (tensor.scalar_type() == at::kQUInt4x2 || tensor.scalar_type() == at::kQUInt2x4) {
      memory = padded(memory, extentBytes(memory));
      lent_->keep(memory);
    }
    const auto* begin = static_cast<const std::byte*>(memory.const_data_ptr());
    planned.region = {memory.device(), begin, begin + extentBytes(memory), memory.storage()};
    planned.hasRegion = true;
  }

  void addStorages(const std::vector<PlannedStorage>& storages, BodyWriter& writer, OutgoingMessage& outgoing) {
    using Place = PlannedStorage::Place;
    Pack pack;
    for (const PlannedStorage& storage : storages) {
      const c10::Device target = targetOf(storage.device);
      const auto targetType = static_cast<int8_t>(target.type());
      uint32_t number = kNowhere;
      if (storage.place == Place::kInline) {
        number = writer.addInlineStorage(storage.begin, storage.bytes, targetType, target.index());
      } else {
        const uint32_t span = storage.place == Place::kPacked ? addToPack(pack, storage, outgoing)
                                                              : addLentSpan(outgoing, storage, target);
        // The receiver takes such bytes into host memory first (Receiver::planDevices()).
        const uint16_t flags = outgoing.spans[span].from.is_cpu() ? wire::kFromHost : 0;
        number = writer.addSpanStorage(storage.bytes, span, targetType, target.index(), flags);
      }
      for (PlannedTensor* tensor : storage.tensors) {
        tensor->record.storage = number;
        tensor->record.storageOffset = (tensor->region.begin - storage.begin) / tensor->record.itemBytes;
      }
    }
    close(pack, outgoing);
  }

  // Storages that travel one after another in one span.
  struct Pack {
    uint32_t span = kNowhere; // the span's number, known from the first storage on
    uint64_t bytes = 0;
    std::vector<const PlannedStorage*> storages;
  };

  // Returns the number of the span.
  uint32_t addToPack(Pack& pack, const PlannedStorage& storage, OutgoingMessage& outgoing) {
    if (pack.bytes + storage.bytes > kPackBytes) {
      close(pack, outgoing);
    }
    if (pack.storages.empty()) {
      pack.span = addSpan(outgoing, nullptr, 0); // filled when the pack is closed
    }
    pack.storages.push_back(&storage);
    pack.bytes += storage.bytes;
    return pack.span;
  }

  void close(Pack& pack, OutgoingMessage& outgoing) {
    if (pack.storages.empty()) {
      return;
    }
    c10::DataPtr copy = HostPool::instance().allocate(pack.bytes);
    auto* to = static_cast<std::byte*>(copy.get());
    outgoing.spans[pack.span].bytes = {to, pack.bytes};
    for (const PlannedStorage* storage : pack.storages) {
      std::memcpy(to, storage->begin, storage->bytes);
      to += storage->bytes;
    }
    lent_->keep(std::move(copy));
    pack = {};
  }

  const c10::intrusive_ptr<Message> message_;
  const Peer& to_;
  const DeviceMap& deviceMap_;
  const Transport* const transport_; // null for a message to oneself
  std::unique_ptr<LentMessage> lent_;
  size_t number_ = 0; // number of the tensor that is being planned
  Devices devices_; // the devices of the message's tensors, without the CPU
  std::vector<PlannedTensor> tensors_;
};

} // namespace

std::unique_ptr<OutgoingMessage> encodeMessage(
    c10::intrusive_ptr<Message> message, const Peer& to, const DeviceMap& deviceMap, const Transport* transport) {
  const OutsideModes guard; // the calling thread's modes must not affect the message
  return Encoder(std::move(message), to, deviceMap, transport).encode();
}

} // namespace torch_ucx_rpc
