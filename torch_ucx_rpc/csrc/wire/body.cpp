#include "wire/body.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

namespace torch_ucx_rpc::wire {

BodyWriter::BodyWriter(uint32_t messageType) {
  prefix_.messageType = messageType;
  prefix_.payloadSpan = kNowhere;
}

void BodyWriter::setInlinePayload(std::span<const char> payload) {
  payload_ = payload;
  prefix_.payloadBytes = payload.size();
}

void BodyWriter::setPayloadSpan(uint64_t bytes, uint32_t span) {
  prefix_.payloadBytes = bytes;
  prefix_.payloadSpan = span;
}

uint32_t BodyWriter::addInlineStorage(const void* data, uint64_t bytes, int8_t deviceType, int8_t deviceIndex) {
  inlineStorages_.push_back({data, bytes});
  inlineBytes_ += bytes;
  return addSpanStorage(bytes, kNowhere, deviceType, deviceIndex);
}

uint32_t BodyWriter::addSpanStorage(
    uint64_t bytes, uint32_t span, int8_t deviceType, int8_t deviceIndex, uint16_t flags) {
  storages_.push_back({bytes, span, deviceType, deviceIndex, flags});
  return prefix_.storages++;
}

void BodyWriter::addTensor(
    TensorRecord record, std::span<const int64_t> sizes, std::span<const int64_t> strides, bool isChild) {
  record.dims = static_cast<uint32_t>(sizes.size());
  tensors_.append(&record, sizeof(record));
  tensors_.append(sizes.data(), sizes.size_bytes());
  tensors_.append(strides.data(), strides.size_bytes());
  ++prefix_.tensorRecords;
  prefix_.tensors += isChild ? 0 : 1;
}

Bytes BodyWriter::finish() {
  Bytes body;
  body.reserve(
      sizeof(prefix_) + storages_.size() * sizeof(StorageRecord) + tensors_.size() + payload_.size() + inlineBytes_);
  body.append(&prefix_, sizeof(prefix_));
  body.append(storages_.data(), storages_.size() * sizeof(StorageRecord));
  body.append(tensors_.data(), tensors_.size());
  body.append(payload_.data(), payload_.size());
  for (const InlineStorage& storage : inlineStorages_) {
    body.append(storage.data, storage.bytes);
  }
  return body;
}

namespace {

Error malformed(const std::string& what) {
  return {ErrorCode::kProtocol, "malformed message: " + what};
}

// Reads the body from its start, and never past its end.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> body) : rest_(body) {}

  // Returns false, without effect, if fewer than `bytes` are left.
  bool take(uint64_t bytes, std::span<const std::byte>& taken) {
    if (bytes > rest_.size()) {
      return false;
    }
    taken = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return true;
  }

  template <typename Record>
  bool read(Record& record) {
    std::span<const std::byte> taken;
    if (!take(sizeof(Record), taken)) {
      return false;
    }
    std::memcpy(&record, taken.data(), sizeof(Record));
    return true;
  }

  bool readInts(uint64_t count, std::span<const int64_t>& ints) {
    std::span<const std::byte> taken;
    if (count > rest_.size() / sizeof(int64_t) || !take(count * sizeof(int64_t), taken)) {
      return false;
    }
    ints = {reinterpret_cast<const int64_t*>(taken.data()), count};
    return true;
  }

  uint64_t left() const {
    return rest_.size();
  }

 private:
  std::span<const std::byte> rest_;
};

// Checks that the storages and the payload use up every span of the message, each byte once.
class SpanCoverage {
 public:
  explicit SpanCoverage(std::span<const uint64_t> spanBytes)
      : spanBytes_(spanBytes), takenBytes_(spanBytes.size(), 0), isTaken_(spanBytes.size(), false) {}

  // Takes the next bytes of the span. `offset` gets their place in the span.
  Error take(uint32_t span, uint64_t bytes, uint64_t& offset) {
    if (span >= spanBytes_.size()) {
      return malformed("it refers to span " + std::to_string(span) + " of " + std::to_string(spanBytes_.size()));
    }
    offset = takenBytes_[span];
    if (isTaken_[span] && offset == spanBytes_[span]) { // the checks below would accept an empty span again
      return malformed("it refers again to span " + std::to_string(span) + ", of which nothing is left");
    }
    if (bytes > spanBytes_[span] - offset) {
      return malformed(
          "span " + std::to_string(span) + " of " + std::to_string(spanBytes_[span]) + " bytes has fewer than " +
          std::to_string(bytes) + " bytes after the first " + std::to_string(offset));
    }
    if (bytes == 0 && spanBytes_[span] != 0) {
      return malformed("an empty part of span " + std::to_string(span));
    }
    takenBytes_[span] += bytes;
    isTaken_[span] = true;
    return {};
  }

  Error takeAll(uint32_t span, uint64_t bytes) {
    uint64_t offset = 0;
    if (Error error = take(span, bytes, offset)) {
      return error;
    }
    return offset == 0 ? Error() : malformed("span " + std::to_string(span) + " has a payload and a storage");
  }

  bool allTaken() const {
    for (size_t span = 0; span < spanBytes_.size(); ++span) {
      if (!isTaken_[span] || takenBytes_[span] != spanBytes_[span]) {
        return false;
      }
    }
    return true;
  }

 private:
  const std::span<const uint64_t> spanBytes_;
  std::vector<uint64_t> takenBytes_;
  std::vector<bool> isTaken_; // a span may have no bytes at all
};

// Whether every element that the sizes and strides can reach lies inside the storage. The peer chose these numbers, so
// every sum and product may overflow. torch has no negative strides.
bool fitsStorage(const BodyView::Tensor& tensor, uint64_t storageBytes) {
  int64_t last = tensor.record.storageOffset; // index of the furthest element
  bool isEmpty = false;
  for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    const int64_t size = tensor.sizes[dim];
    const int64_t stride = tensor.strides[dim];
    if (size < 0 || stride < 0) {
      return false;
    }
    int64_t reach = 0;
    if (size == 0) {
      isEmpty = true;
    } else if (__builtin_mul_overflow(size - 1, stride, &reach) || __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  if (tensor.record.storageOffset < 0) {
    return false;
  }
  const uint64_t elements = storageBytes / tensor.record.itemBytes;
  return isEmpty ? static_cast<uint64_t>(tensor.record.storageOffset) <= elements
                 : static_cast<uint64_t>(last) < elements;
}

// Whether torch can count the elements of a tensor with these sizes.
bool countable(std::span<const int64_t> sizes) {
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) {
      return false;
    }
  }
  return true;
}

uint32_t childrenOf(Layout layout) {
  switch (layout) {
    case Layout::kSparseCoo:
    case Layout::kQuantizedPerChannel:
      return 2;
    case Layout::kSparseCsr:
    case Layout::kSparseCsc:
    case Layout::kSparseBsr:
    case Layout::kSparseBsc:
      return 3;
    case Layout::kUndefined:
    case Layout::kStrided:
    case Layout::kQuantizedPerTensor:
      break;
  }
  return 0;
}

bool ownsStorage(Layout layout) {
  return layout == Layout::kStrided || layout == Layout::kQuantizedPerTensor || layout == Layout::kQuantizedPerChannel;
}

Error readTensor(Cursor& cursor, const BodyView& view, bool isChild, BodyView::Tensor& tensor) {
  TensorRecord& record = tensor.record;
  if (!cursor.read(record) || !cursor.readInts(record.dims, tensor.sizes)) {
    return malformed("it ends inside a tensor record");
  }
  if (record.layout > Layout::kQuantizedPerChannel || record.children != childrenOf(record.layout)) {
    return malformed("a tensor of an unknown layout");
  }
  if (isChild && record.layout != Layout::kStrided) {
    return malformed("a part of a tensor that is not strided");
  }
  if (!countable(tensor.sizes)) {
    return malformed("a tensor of impossible sizes");
  }
  if (!ownsStorage(record.layout)) {
    return record.storage == kNowhere ? Error() : malformed("a storage for a tensor that owns none");
  }
  if (!cursor.readInts(record.dims, tensor.strides)) {
    return malformed("it ends inside a tensor record");
  }
  if (record.itemBytes == 0 || record.storage >= view.storages.size() ||
      !fitsStorage(tensor, view.storages[record.storage].record.bytes)) {
    return malformed("a tensor that reaches outside its storage");
  }
  return {};
}

} // namespace

uint32_t messageTypeOf(std::span<const std::byte> body) {
  BodyPrefix prefix;
  return Cursor(body).read(prefix) ? prefix.messageType : 0;
}

uint32_t payloadSpanOf(std::span<const std::byte> body) {
  BodyPrefix prefix;
  return Cursor(body).read(prefix) ? prefix.payloadSpan : kNowhere;
}

std::span<const StorageRecord> storagesOf(std::span<const std::byte> body) {
  BodyPrefix prefix;
  if (!Cursor(body).read(prefix)) {
    return {};
  }
  const uint64_t room = (body.size() - sizeof(prefix)) / sizeof(StorageRecord);
  return {
      reinterpret_cast<const StorageRecord*>(body.data() + sizeof(prefix)),
      static_cast<size_t>(std::min<uint64_t>(prefix.storages, room))};
}

Error readBody(std::span<const std::byte> body, std::span<const uint64_t> spanBytes, BodyView& view) {
  if (reinterpret_cast<uintptr_t>(body.data()) % alignof(int64_t) != 0) {
    return {ErrorCode::kInternal, "the body of a message was received into unaligned memory"};
  }
  Cursor cursor(body);
  SpanCoverage spans(spanBytes);
  BodyPrefix prefix;
  if (!cursor.read(prefix)) {
    return malformed("it has only " + std::to_string(body.size()) + " bytes");
  }
  view.messageType = prefix.messageType;
  view.tensorCount = prefix.tensors;
  view.payloadSpan = prefix.payloadSpan;

  // Before it takes memory, checks each count against the bytes that are left. A body of 100 bytes cannot claim a
  // million records.
  if (prefix.storages > cursor.left() / sizeof(StorageRecord)) {
    return malformed("it is too short for its storages");
  }
  view.storages.resize(prefix.storages);
  for (BodyView::Storage& storage : view.storages) {
    cursor.read(storage.record); // there are enough bytes, as just checked
    if (storage.record.bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return malformed("a storage of impossible size");
    }
    if (storage.record.span != kNowhere) {
      if (Error error = spans.take(storage.record.span, storage.record.bytes, storage.spanOffset)) {
        return error;
      }
      storage.isPacked = storage.record.bytes != spanBytes[storage.record.span];
    }
  }

  if (prefix.tensorRecords > cursor.left() / sizeof(TensorRecord)) {
    return malformed("it is too short for its tensors");
  }
  view.tensors.resize(prefix.tensorRecords);
  // The children of a tensor follow it, and have no children. So one number says how many are due.
  uint32_t topLevel = 0;
  uint32_t childrenDue = 0;
  for (BodyView::Tensor& tensor : view.tensors) {
    const bool isChild = childrenDue > 0;
    if (Error error = readTensor(cursor, view, isChild, tensor)) {
      return error;
    }
    topLevel += isChild ? 0 : 1;
    childrenDue = isChild ? childrenDue - 1 : tensor.record.children;
  }
  if (childrenDue != 0 || topLevel != prefix.tensors) {
    return malformed("its tensor records do not add up");
  }

  if (prefix.payloadSpan != kNowhere) {
    if (Error error = spans.takeAll(prefix.payloadSpan, prefix.payloadBytes)) {
      return error;
    }
  } else if (!cursor.take(prefix.payloadBytes, view.payload)) {
    return malformed("it ends inside its payload");
  }
  for (BodyView::Storage& storage : view.storages) {
    if (storage.record.span == kNowhere && !cursor.take(storage.record.bytes, storage.inlineBytes)) {
      return malformed("it ends inside an inline storage");
    }
  }
  if (cursor.left() != 0) {
    return malformed(std::to_string(cursor.left()) + " bytes too many");
  }
  if (!spans.allTaken()) {
    return malformed("nothing refers to one of its spans, or to a part of it");
  }
  return {};
}

} // namespace torch_ucx_rpc::wire
