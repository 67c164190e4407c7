#pragma once

#include "base/bytes.h"
#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// The body of a message. It holds the type of the message, the place of each tensor, and everything that is small. A
// put has more bytes after it (wire/put.h).
//
//      +----------------+-----------------+------------------------------------+---------+-----------------+
//      | BodyPrefix, 32 | StorageRecord[] | TensorRecord[], each followed by   | payload | bytes of the    |
//      |                | 16 each         | its sizes and strides (int64 each) | if here | inline storages |
//      +----------------+-----------------+------------------------------------+---------+-----------------+
//
// Everything before the payload is 8-byte aligned, so sizes, strides and storage records can be read in place.
//
// The payload is inline, in this body, or a span of its own. A storage is inline, a span of its own, or packed: several
// storages name the same span. Packed storages lie in their span one after another, without gaps, in the order of their
// records, and fill it.
//
// Tensor records are a forest in depth-first order. A strided tensor has no children. A sparse tensor has its index and
// value tensors as children. A tensor quantized per channel has its scales and zero points as children.

namespace torch_ucx_rpc::wire {

inline constexpr uint32_t kNowhere = 0xFFFFFFFF; // as a span: inline; as a storage: the tensor owns none

enum class Layout : uint8_t {
  kUndefined = 0, // an undefined tensor, which autograd sends for a missing gradient
  kStrided = 1,
  kSparseCoo = 2, // children: indices, values
  kSparseCsr = 3, // children: compressed indices, plain indices, values; the next three have the same
  kSparseCsc = 4,
  kSparseBsr = 5,
  kSparseBsc = 6,
  kQuantizedPerTensor = 7, // scale, zeroPoint
  kQuantizedPerChannel = 8, // axis; children: scales, zero points
};

enum TensorFlags : uint8_t {
  kRequiresGrad = 1 << 0,
  kConjugate = 1 << 1, // torch's lazy conjugate and negative bits
  kNegative = 1 << 2,
  kCoalesced = 1 << 3, // of a sparse COO tensor
};

enum StorageFlags : uint16_t {
  kFromHost = 1 << 0, // its span lies in the sender's host memory, whatever device it is for
};

struct BodyPrefix {
  uint32_t messageType; // torch::distributed::rpc::MessageType
  uint32_t tensors; // of the message
  uint32_t tensorRecords; // tensors of the message, and their children
  uint32_t storages;
  uint64_t payloadBytes;
  uint32_t payloadSpan;
  uint32_t reserved;
};
static_assert(sizeof(BodyPrefix) == 32);

struct StorageRecord {
  uint64_t bytes;
  uint32_t span; // kNowhere: inline
  int8_t deviceType; // c10::DeviceType of the memory where the storage is to arrive
  int8_t deviceIndex;
  uint16_t flags; // readers ignore unknown flags
};
static_assert(sizeof(StorageRecord) == 16);

struct TensorRecord {
  Layout layout;
  uint8_t dtype; // c10::ScalarType
  uint8_t itemBytes; // of the dtype; readBody() checks bounds with it, without torch
  uint8_t flags;
  uint32_t dims;
  uint32_t storage; // kNowhere for sparse and undefined tensors
  uint32_t children;
  int64_t storageOffset; // elements
  int64_t axis;
  double scale;
  int64_t zeroPoint;
};
static_assert(sizeof(TensorRecord) == 48);

// Builds a body. Not thread-safe. Storages and tensors get numbers in the order in which they are added. The payload
// and the inline storages stay the caller's: their memory must stay valid until finish().
class BodyWriter {
 public:
  explicit BodyWriter(uint32_t messageType);

  void setInlinePayload(std::span<const char> payload);
  void setPayloadSpan(uint64_t bytes, uint32_t span);

  // Both return the number of the storage. Storages of the same span are packed.
  uint32_t addInlineStorage(const void* data, uint64_t bytes, int8_t deviceType, int8_t deviceIndex);
  uint32_t addSpanStorage(uint64_t bytes, uint32_t span, int8_t deviceType, int8_t deviceIndex, uint16_t flags = 0);

  // The writer sets `record.dims` from `sizes`. `strides` is empty for a tensor without storage. Add children right
  // after their parent.
  void addTensor(TensorRecord record, std::span<const int64_t> sizes, std::span<const int64_t> strides, bool isChild);

  // Returns the whole body. Do not use the writer afterwards.
  Bytes finish();

 private:
  struct InlineStorage {
    const void* data;
    uint64_t bytes;
  };
  BodyPrefix prefix_{};
  std::span<const char> payload_;
  std::vector<StorageRecord> storages_;
  std::vector<InlineStorage> inlineStorages_;
  Bytes tensors_;
  uint64_t inlineBytes_ = 0;
};

// A checked body. Every count, index, size and extent agrees with the others, with the body's length and with the
// message's spans. The view points into the body, which must outlive it.
struct BodyView {
  struct Storage {
    StorageRecord record;
    std::span<const std::byte> inlineBytes; // where record.span is kNowhere
    uint64_t spanOffset = 0; // where the storage begins in its span
    bool isPacked = false; // the span has other storages too
  };
  struct Tensor {
    TensorRecord record;
    std::span<const int64_t> sizes;
    std::span<const int64_t> strides; // empty where record.storage is kNowhere
  };
  uint32_t messageType = 0;
  uint32_t tensorCount = 0; // top-level ones
  std::span<const std::byte> payload; // where payloadSpan is kNowhere
  uint32_t payloadSpan = kNowhere;
  std::vector<Storage> storages;
  std::vector<Tensor> tensors; // depth-first
};

// Reads the type of torch's message from an unchecked body; 0 if the body is too short.
uint32_t messageTypeOf(std::span<const std::byte> body);

// Reads the span of the payload, or kNowhere, from an unchecked body. The result may be any number.
uint32_t payloadSpanOf(std::span<const std::byte> body);

// Reads the storages of an unchecked body (8-byte aligned), as many as there is room for. They say where the spans are
// to arrive. The receiver must know this before it receives the spans.
std::span<const StorageRecord> storagesOf(std::span<const std::byte> body);

// Checks and reads `body` (8-byte aligned). `spanBytes` has the size of each span of the message. Storages and the
// payload must use up every span, each byte once. Allocates in proportion to the body's real length.
Error readBody(std::span<const std::byte> body, std::span<const uint64_t> spanBytes, BodyView& view);

} // namespace torch_ucx_rpc::wire
