// The part of Channel that turns values into messages, and messages into values.

#include "rpc/channel_parts.h"
#include "tensors/tensor_codec.h"
#include "wire/body.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using rpc::JitFuture;

namespace {

constexpr auto kValueType = rpc::MessageType::UNKNOWN;

// Owns the body of a value that is too large to travel with the put, until the receiver has fetched it.
class BodyLender final : public Lender {
 public:
  BodyLender(Bytes body, std::unique_ptr<Lender> rest) : body_(std::move(body)), rest_(std::move(rest)) {}
  bool mayRunUserCode() const override {
    return rest_ != nullptr && rest_->mayRunUserCode();
  }
  std::span<const std::byte> body() const {
    return body_;
  }

 private:
  const Bytes body_;
  const std::unique_ptr<Lender> rest_;
};

void moveBodyIntoSpan(OutgoingMessage& message) {
  TORCH_CHECK(
      std::ranges::all_of(message.spans, [](const OutgoingMessage::Span& span) { return span.from.is_cpu(); }),
      "a value has too many small tensors on the CPU beside tensors on devices: put them under tags of their own");
  wire::BodyWriter placeholder(static_cast<uint32_t>(kValueType));
  placeholder.setPayloadSpan(message.body.size(), static_cast<uint32_t>(message.spans.size()));
  auto lender = std::make_unique<BodyLender>(std::move(message.body), std::move(message.lender));
  message.spans.push_back({lender->body()});
  message.lender = std::move(lender);
  message.body = placeholder.finish();
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  for (const at::Tensor& tensor : tensors) {
    text << (text.tellp() == 0 ? "" : ", ") << tensor.sizes() << " " << tensor.scalar_type();
  }
  return tensors.empty() ? "no tensors" : text.str();
}

// Whether the bytes of the elements may be received into the tensor's memory. A tensor with __torch_dispatch__ may have
// no memory of its own.
bool takesBytes(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() && tensor.is_contiguous() &&
      !tensor.is_conj() && !tensor.is_neg() && !tensor.key_set().has(c10::DispatchKey::Python);
}

} // namespace

std::unique_ptr<OutgoingMessage> Channel::encode(const Peer& to, const Name& name, const Value& value) const {
  std::unique_ptr<OutgoingMessage> message = encodeMessage(
      c10::make_intrusive<rpc::Message>(std::vector<char>(), std::vector<at::Tensor>(value.tensors), kValueType),
      to,
      deviceMaps_.forRequestsTo(to.member().name),
      messenger_.transportTo(to));
  uint32_t flags = value.isSingle ? uint32_t{wire::kSingle} : 0;
  if (message->body.size() + name.group.size() + name.tag.size() + sizeof(wire::PutTrailer) >
      OutgoingMessage::kEagerBodyBytes) {
    moveBodyIntoSpan(*message);
    flags |= wire::kBodyInSpan;
  }
  wire::appendPutName(message->body, {name.group, name.epoch, name.tag, flags});
  return message;
}

Channel::Value Channel::decode(Expected& expected) {
  IncomingMessage message = std::move(expected.message);
  Peer& from = expected.from;
  const auto unreadable = [&](const Error& error) {
    return from.failureFrom(
        error,
        "the value of " + from.describe() + " under tag '" + expected.name.tag + "' is unreadable: " + error.message());
  };
  if (const Error error = messenger_.checkContent(message)) {
    throw unreadable(error);
  }
  wire::PutName name;
  size_t bodyBytes = 0;
  (void)wire::readPutName(message.eagerBody, name, bodyBytes); // onPut() has checked it
  const uint32_t flags = name.flags;
  message.eagerBody.resizeUninitialized(bodyBytes);
  if ((flags & wire::kBodyInSpan) != 0 && !message.spans.empty()) {
    message.pooledBodyBytes = message.spans.back().bytes;
    message.pooledBody = std::move(message.spans.back().data);
    message.spans.pop_back();
  }

  DecodedMessage decoded;
  const Devices& devices = deviceMaps_.devices();
  try {
    c10::intrusive_ptr<JitFuture> onDevices;
    {
      const Streams streams = deviceMaps_.takeStreams(devices);
      message.pendingWork.blockStreams(streams);
      const c10::MultiStreamGuard guard(streams);
      if (const Error error = decodeMessage(std::move(message), devices, decoded)) {
        throw unreadable(error);
      }
      if (!devices.empty()) {
        onDevices = c10::make_intrusive<JitFuture>(at::AnyClassType::get(), devices);
        onDevices->markCompleted(decoded.message, std::move(decoded.deviceStorages));
      }
    }
    if (onDevices) {
      onDevices->waitAndThrow(); // the current streams of this thread wait for those above
    }
  } catch (const c10::Error& failure) {
    throw unreadable(deviceFailed(failure));
  }
  std::vector<at::Tensor> tensors = std::move(decoded.message->tensors());
  const bool isSingle = (flags & wire::kSingle) != 0;
  if (expected.isInOthersMemory) {
    for (at::Tensor& tensor : tensors) {
      tensor = tensor.clone();
    }
  }
  if (!expected.into) {
    return {std::move(tensors), isSingle};
  }
  const std::vector<at::Tensor>& into = *expected.into;
  const bool fits = std::ranges::equal(tensors, into, [](const at::Tensor& value, const at::Tensor& posted) {
    return value.defined() && value.sizes() == posted.sizes() && value.scalar_type() == posted.scalar_type();
  });
  if (!fits) {
    throw std::invalid_argument(
        "the value under tag '" + expected.name.tag + "' from worker '" + from.member().name +
        "' does not fit the tensors that were posted for it: got " + describe(tensors) + "; expected " +
        describe(into));
  }
  const at::NoGradGuard noGrad;
  for (size_t index = 0; index < into.size(); ++index) {
    if (!into[index].is_cpu() || tensors[index].numel() == 0 || tensors[index].layout() != at::kStrided ||
        into[index].const_data_ptr() != tensors[index].const_data_ptr()) {
      into[index].copy_(tensors[index]);
    } else if (!into[index].is_inference()) {
      // UCX has written the bytes. As after copy_(), a backward that needs the old ones must fail.
      into[index].unsafeGetTensorImpl()->bump_version();
    }
  }
  return {into, isSingle};
}

std::vector<c10::DataPtr> Channel::memoryIn(
    const Expected& expected, std::span<const std::byte> body, std::span<const uint64_t> spanBytes) const {
  wire::BodyView view;
  if (!expected.into || wire::readBody(body, spanBytes, view)) {
    return {};
  }
  const std::vector<at::Tensor>& into = *expected.into;
  if (view.tensors.size() != into.size()) {
    return {};
  }
  std::vector<c10::DataPtr> memory(spanBytes.size());
  bool isAny = false;
  for (size_t index = 0; index < into.size(); ++index) {
    const wire::TensorRecord& record = view.tensors[index].record;
    const at::Tensor& tensor = into[index];
    const std::span<const int64_t> sizes = view.tensors[index].sizes;
    const std::span<const int64_t> strides = view.tensors[index].strides;
    constexpr uint8_t kBits = wire::kConjugate | wire::kNegative;
    if (record.storage >= view.storages.size() || record.layout != wire::Layout::kStrided ||
        (record.flags & kBits) != 0 || record.storageOffset != 0 || !takesBytes(tensor) ||
        record.dtype != static_cast<uint8_t>(tensor.scalar_type()) || !std::ranges::equal(sizes, tensor.sizes()) ||
        !std::ranges::equal(strides, tensor.strides())) {
      continue;
    }
    const wire::StorageRecord& storage = view.storages[record.storage].record;
    if (storage.span == wire::kNowhere || view.storages[record.storage].isPacked || memory[storage.span] ||
        storage.bytes != tensor.nbytes() || storage.deviceType != static_cast<int8_t>(c10::kCPU)) {
      continue;
    }
    struct Posted {
      at::Tensor tensor;
      std::shared_ptr<Grave> grave;
    };
    auto posted = std::make_unique<Posted>(tensor, grave_);
    memory[storage.span] = c10::DataPtr(
        tensor.data_ptr(),
        posted.release(),
        [](void* context) {
          const std::unique_ptr<Posted> posted(static_cast<Posted*>(context));
          posted->grave->add(std::move(posted->tensor));
        },
        c10::kCPU);
    isAny = true;
  }
  return isAny ? std::move(memory) : std::vector<c10::DataPtr>();
}

} // namespace torch_ucx_rpc
