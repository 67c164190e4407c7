#include "memory/host_pool.h"
#include "tensors/device_copy.h"
#include "tensors/outside_modes.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

using torch::distributed::rpc::MessageType;
using wire::BodyView;
using wire::kNowhere;
using wire::Layout;
using wire::TensorRecord;

// A torch message type is a byte and two flags, 0x100 and 0x200.
constexpr uint32_t kMaxMessageType = 0x3FF;

c10::IntArrayRef refOf(std::span<const int64_t> numbers) {
  return {numbers.data(), numbers.size()};
}

// Turns a checked body and its spans into tensors.
class Decoder {
 public:
  Decoder(const BodyView& view, std::vector<IncomingMessage::Span>& spans, const Devices& devices)
      : view_(view), devices_(devices) {
    // readBody() has checked that the body uses each byte of each span once. So every index below is in range, and each
    // span that is not a pack belongs to one storage.
    storages_.reserve(view.storages.size());
    for (const BodyView::Storage& storage : view.storages) {
      const c10::Device device = deviceOf(storage.record);
      storages_.push_back(
          storage.record.span == kNowhere ? copyInline(storage, device)
              : storage.isPacked          ? copyPacked(storage, spans[storage.record.span], device)
                                          : adopt(spans[storage.record.span], device));
      if (!device.is_cpu()) { // the handler works on this stream, and the memory may be of another
        recordOnCurrentStream(storages_.back().data_ptr());
      }
    }
  }

  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> deviceStorages() const {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (const c10::Storage& storage : storages_) {
      if (!storage.device().is_cpu()) {
        storages.push_back(storage.getWeakStorageImpl());
      }
    }
    return storages;
  }

  std::vector<at::Tensor> tensors() {
    std::vector<at::Tensor> tensors;
    tensors.reserve(view_.tensorCount);
    for (uint32_t index = 0; index < view_.tensorCount; ++index) {
      tensors.push_back(next());
    }
    return tensors;
  }

 private:
  // The allocator serves a later resize_() of the tensor.
  static c10::Storage makeStorage(c10::DataPtr data, uint64_t bytes, c10::Allocator* allocator) {
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        c10::SymInt(static_cast<int64_t>(bytes)),
        std::move(data),
        allocator,
        /*resizable=*/true);
  }

  c10::Device deviceOf(const wire::StorageRecord& record) const {
    if (record.deviceType == static_cast<int8_t>(c10::kCPU)) {
      return c10::kCPU;
    }
    const c10::Device* device = findDevice(devices_, record.deviceType, record.deviceIndex);
    TORCH_CHECK(device != nullptr, "malformed message: a tensor for a device that this worker does not use for RPC");
    return *device;
  }

  static c10::Storage copyInline(const BodyView::Storage& storage, c10::Device device) {
    return copySmall(storage.inlineBytes.data(), storage.record.bytes, device);
  }

  static c10::Storage copyPacked(
      const BodyView::Storage& storage, const IncomingMessage::Span& pack, c10::Device device) {
    TORCH_CHECK(pack.data.device().is_cpu(), "malformed message: packed storages on a device");
    const auto* begin = static_cast<const std::byte*>(pack.data.get()) + storage.spanOffset;
    return copySmall(begin, storage.record.bytes, device);
  }

  // Each storage has memory of its own, so that it can be resized and outlives the others.
  static c10::Storage copySmall(const std::byte* bytes, uint64_t count, c10::Device device) {
    if (!device.is_cpu()) {
      return copyFromHost(bytes, count, device);
    }
    c10::Allocator* allocator = c10::GetCPUAllocator();
    c10::DataPtr data = allocator->allocate(count);
    if (count != 0) {
      std::memcpy(data.get(), bytes, count);
    }
    return makeStorage(std::move(data), count, allocator);
  }

  static c10::Storage copyFromHost(const void* bytes, uint64_t count, c10::Device device) {
    return makeStorage(copyBytes(bytes, count, c10::kCPU, device), count, allocatorOf(device.type()));
  }

  static c10::Storage adopt(IncomingMessage::Span& span, c10::Device device) {
    if (device.is_cpu()) {
      return makeStorage(std::move(span.data), span.bytes, &HostPool::instance());
    }
    // Spans from the sender's host memory arrive in host memory.
    if (span.data.device() != device || span.isBesidePool) {
      span.data = moveToDevice(std::move(span.data), span.bytes, device);
    }
    return makeStorage(std::move(span.data), span.bytes, allocatorOf(device.type()));
  }

  // torch's factories trust their arguments, and a peer may have written anything. So the record is checked here.
  static c10::ScalarType dtypeOf(const TensorRecord& record) {
    TORCH_CHECK(
        record.dtype < static_cast<uint8_t>(c10::ScalarType::Undefined),
        "malformed message: unknown dtype ",
        static_cast<int>(record.dtype));
    const auto dtype = static_cast<c10::ScalarType>(record.dtype);
    TORCH_CHECK(
        record.layout == Layout::kUndefined || c10::elementSize(dtype) == record.itemBytes,
        "malformed message: elements of ",
        static_cast<int>(record.itemBytes),
        " bytes for dtype ",
        dtype);
    const bool isQuantized =
        record.layout == Layout::kQuantizedPerTensor || record.layout == Layout::kQuantizedPerChannel;
    TORCH_CHECK(isQuantized == c10::isQIntType(dtype), "malformed message: dtype ", dtype, " in a wrong layout");
    return dtype;
  }

  // Makes the tensor of the next record. A tensor with children takes them from the records that follow. Children have
  // no children (readBody() has checked that), so a peer cannot make this recurse deeply.
  at::Tensor next() {
    const BodyView::Tensor& tensor = view_.tensors[position_++];
    const TensorRecord& record = tensor.record;
    const c10::ScalarType dtype = dtypeOf(record);
    at::Tensor made;
    switch (record.layout) {
      case Layout::kUndefined:
        return made; // before the flags, which need a tensor
      case Layout::kStrided:
        made = strided(tensor, dtype);
        break;
      case Layout::kSparseCoo:
        made = coo(tensor);
        break;
      case Layout::kSparseCsr:
        made = compressed(tensor, at::kSparseCsr);
        break;
      case Layout::kSparseCsc:
        made = compressed(tensor, at::kSparseCsc);
        break;
      case Layout::kSparseBsr:
        made = compressed(tensor, at::kSparseBsr);
        break;
      case Layout::kSparseBsc:
        made = compressed(tensor, at::kSparseBsc);
        break;
      case Layout::kQuantizedPerTensor:
        made = quantized(tensor, dtype, at::make_per_tensor_affine_quantizer(record.scale, record.zeroPoint, dtype));
        break;
      case Layout::kQuantizedPerChannel: {
        const at::Tensor scales = next();
        const at::Tensor zeroPoints = next();
        checkChannels(tensor, scales, zeroPoints);
        made = quantized(tensor, dtype, at::make_per_channel_affine_quantizer(scales, zeroPoints, record.axis, dtype));
        break;
      }
    }
    // The memory is as the sender had it: lazy operations are still to be done.
    if ((record.flags & wire::kConjugate) != 0) {
      made = made.conj();
    }
    if ((record.flags & wire::kNegative) != 0) {
      made = made._neg_view();
    }
    if ((record.flags & wire::kRequiresGrad) != 0) {
      made.set_requires_grad(true);
    }
    return made;
  }

  // A tensor on a storage that others may share: torch has no factory for one.
  template <typename Impl, typename... Args>
  at::Tensor place(const BodyView::Tensor& tensor, c10::ScalarType dtype, Args&&... args) const {
    const c10::Storage& storage = storages_[tensor.record.storage];
    at::Tensor made = at::detail::make_tensor<Impl>(
        c10::Storage(storage),
        c10::DispatchKeySet(c10::computeDispatchKey(dtype, at::kStrided, storage.device())),
        c10::scalarTypeToTypeMeta(dtype),
        std::forward<Args>(args)...);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        refOf(tensor.sizes), refOf(tensor.strides), tensor.record.storageOffset);
    return made;
  }

  at::Tensor strided(const BodyView::Tensor& tensor, c10::ScalarType dtype) const {
    return place<c10::TensorImpl>(tensor, dtype);
  }

  at::Tensor quantized(const BodyView::Tensor& tensor, c10::ScalarType dtype, at::QuantizerPtr quantizer) const {
    return place<at::QTensorImpl>(tensor, dtype, std::move(quantizer));
  }

  static void checkChannels(const BodyView::Tensor& tensor, const at::Tensor& scales, const at::Tensor& zeroPoints) {
    const int64_t axis = tensor.record.axis;
    TORCH_CHECK(
        axis >= 0 && axis < static_cast<int64_t>(tensor.sizes.size()) && scales.dim() == 1 && zeroPoints.dim() == 1 &&
            scales.numel() == tensor.sizes[axis] && zeroPoints.numel() == tensor.sizes[axis],
        "malformed message: the channels of a quantized tensor do not fit its shape");
  }

  at::Tensor coo(const BodyView::Tensor& tensor) {
    const at::Tensor indices = next();
    const at::Tensor values = next();
    const bool isCoalesced = (tensor.record.flags & wire::kCoalesced) != 0;
    // Indices outside of the tensor would become reads outside of its memory later.
    at::_validate_sparse_coo_tensor_args(indices, values, refOf(tensor.sizes), isCoalesced);
    at::Tensor made = at::sparse_coo_tensor(indices, values, refOf(tensor.sizes), values.options().layout(at::kSparse));
    return made._coalesced_(isCoalesced);
  }

  at::Tensor compressed(const BodyView::Tensor& tensor, at::Layout layout) {
    const at::Tensor compressedIndices = next();
    const at::Tensor plainIndices = next();
    const at::Tensor values = next();
    at::_validate_sparse_compressed_tensor_args(compressedIndices, plainIndices, values, refOf(tensor.sizes), layout);
    return at::sparse_compressed_tensor(
        compressedIndices, plainIndices, values, refOf(tensor.sizes), values.options().layout(layout));
  }

  const BodyView& view_;
  const Devices& devices_;
  std::vector<c10::Storage> storages_;
  size_t position_ = 0;
};

std::vector<char> payloadOf(const BodyView& view, std::vector<IncomingMessage::Span>& spans) {
  if (view.payloadSpan == kNowhere) {
    const auto* begin = reinterpret_cast<const char*>(view.payload.data());
    return {begin, begin + view.payload.size()};
  }
  const IncomingMessage::Span& span = spans[view.payloadSpan];
  const auto* begin = static_cast<const char*>(span.data.get());
  return {begin, begin + span.bytes};
}

} // namespace

Error decodeMessage(IncomingMessage incoming, const Devices& devices, DecodedMessage& decoded) {
  const uint64_t bytes = incoming.totalBytes();
  try {
    std::vector<uint64_t> spanBytes;
    spanBytes.reserve(incoming.spans.size());
    for (const IncomingMessage::Span& span : incoming.spans) {
      spanBytes.push_back(span.bytes);
    }
    BodyView view;
    if (Error error = wire::readBody(incoming.body(), spanBytes, view)) {
      return error;
    }
    if (view.messageType > kMaxMessageType) {
      return {ErrorCode::kProtocol, "malformed message: unknown type " + std::to_string(view.messageType)};
    }
    const OutsideModes guard; // the calling thread's modes must not affect the tensors that arrive
    std::vector<char> payload = payloadOf(view, incoming.spans);
    Decoder decoder(view, incoming.spans, devices);
    std::vector<at::Tensor> tensors = decoder.tensors();
    decoded.deviceStorages = decoder.deviceStorages();
    decoded.message = c10::make_intrusive<Message>(
        std::move(payload),
        std::move(tensors),
        static_cast<MessageType>(view.messageType),
        static_cast<int64_t>(incoming.header.callId));
  } catch (const std::bad_alloc&) {
    return outOfMemoryFor(bytes);
  } catch (const c10::OutOfMemoryError& error) {
    return deviceFailed(error);
  } catch (const std::exception& error) {
    return {ErrorCode::kProtocol, error.what()};
  }
  return {};
}

} // namespace torch_ucx_rpc
