#include "wire/body.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace torch_ucx_rpc::wire {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TensorRecord record(Layout layout, uint32_t storage = kNowhere, uint32_t children = 0, int64_t storageOffset = 0) {
  TensorRecord made{};
  made.layout = layout;
  made.dtype = 6;
  made.itemBytes = 4;
  made.storage = storage;
  made.children = children;
  made.storageOffset = storageOffset;
  return made;
}

// A body with every kind of record, and the place of each field.
class Sample {
 public:
  Sample() {
    BodyWriter writer(0x102);
    writer.setInlinePayload(payload);
    EXPECT_EQ(writer.addInlineStorage(small.data(), small.size() * sizeof(float), 0, -1), 0u);
    EXPECT_EQ(writer.addSpanStorage(spanBytes[1], 1, 0, -1), 1u);
    EXPECT_EQ(writer.addSpanStorage(spanBytes[0], 0, 0, -1), 2u);
    writer.addTensor(record(Layout::kStrided, 0, 0, 2), sizes, strides, false);
    writer.addTensor(record(Layout::kUndefined), {}, {}, false);
    writer.addTensor(record(Layout::kSparseCoo, kNowhere, 2), cooSizes, {}, false);
    writer.addTensor(record(Layout::kStrided, 1), indexSizes, indexStrides, true);
    writer.addTensor(record(Layout::kStrided, 2), valueSizes, one, true);
    body = writer.finish();
  }

  Error read(BodyView& view) const {
    return readBody(body, spanBytes, view);
  }

  static constexpr size_t kStorages = sizeof(BodyPrefix);
  static constexpr size_t kTensors = kStorages + 3 * sizeof(StorageRecord);
  static constexpr size_t kUndefined = kTensors + sizeof(TensorRecord) + 4 * sizeof(int64_t);
  static constexpr size_t kCoo = kUndefined + sizeof(TensorRecord);
  static constexpr size_t kIndices = kCoo + sizeof(TensorRecord) + 2 * sizeof(int64_t);

  std::string payload = "pickle";
  std::vector<float> small = std::vector<float>(16, 1.5f);
  std::vector<uint64_t> spanBytes = {4000, 8000};
  std::vector<int64_t> sizes = {2, 3};
  std::vector<int64_t> strides = {5, 1};
  std::vector<int64_t> cooSizes = {1000, 1000};
  std::vector<int64_t> indexSizes = {2, 1000};
  std::vector<int64_t> indexStrides = {1000, 1};
  std::vector<int64_t> valueSizes = {1000};
  std::vector<int64_t> one = {1};
  Bytes body;
};

TEST(WireBodyTest, EmptyBodyIsOnlyItsPrefix) {
  const Bytes body = BodyWriter(7).finish();
  EXPECT_EQ(body.size(), sizeof(BodyPrefix));
  BodyView view;
  ASSERT_FALSE(readBody(body, {}, view));
  EXPECT_EQ(view.messageType, 7u);
  EXPECT_EQ(view.tensorCount, 0u);
  EXPECT_TRUE(view.payload.empty());
  EXPECT_TRUE(view.tensors.empty());
}

TEST(WireBodyTest, EverythingWrittenIsRead) {
  const Sample sample;
  BodyView view;
  const Error error = sample.read(view);
  ASSERT_FALSE(error) << error.message();
  EXPECT_EQ(view.messageType, 0x102u);
  EXPECT_EQ(view.tensorCount, 3u);
  EXPECT_EQ(view.payloadSpan, kNowhere);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(view.payload.data()), view.payload.size()), sample.payload);

  ASSERT_EQ(view.storages.size(), 3u);
  EXPECT_EQ(view.storages[0].record.bytes, 64u);
  ASSERT_EQ(view.storages[0].inlineBytes.size(), 64u);
  EXPECT_EQ(std::memcmp(view.storages[0].inlineBytes.data(), sample.small.data(), 64), 0);
  EXPECT_EQ(view.storages[1].record.span, 1u);
  EXPECT_EQ(view.storages[2].record.span, 0u);

  ASSERT_EQ(view.tensors.size(), 5u);
  const BodyView::Tensor& strided = view.tensors[0];
  EXPECT_EQ(strided.record.layout, Layout::kStrided);
  EXPECT_EQ(strided.record.storageOffset, 2);
  EXPECT_EQ(std::vector(strided.sizes.begin(), strided.sizes.end()), sample.sizes);
  EXPECT_EQ(std::vector(strided.strides.begin(), strided.strides.end()), sample.strides);
  EXPECT_EQ(view.tensors[1].record.layout, Layout::kUndefined);
  EXPECT_EQ(view.tensors[2].record.layout, Layout::kSparseCoo);
  EXPECT_TRUE(view.tensors[2].strides.empty());
  EXPECT_EQ(view.tensors[4].record.storage, 2u);
}

TEST(WireBodyTest, PayloadCanBeASpan) {
  BodyWriter writer(1);
  writer.setPayloadSpan(100'000, 0);
  const Bytes body = writer.finish();
  BodyView view;
  const std::vector<uint64_t> spans = {100'000};
  ASSERT_FALSE(readBody(body, spans, view));
  EXPECT_EQ(view.payloadSpan, 0u);
  EXPECT_TRUE(view.payload.empty());
}

struct LayoutCase {
  Layout layout;
  uint32_t children;
  bool ownsStorage;
};

class WireBodyLayoutTest : public testing::TestWithParam<LayoutCase> {};

TEST_P(WireBodyLayoutTest, RoundTrip) {
  const auto [layout, children, ownsStorage] = GetParam();
  const std::vector<float> data(12, 2.0f);
  const std::vector<int64_t> sizes = {3, 4};
  const std::vector<int64_t> strides = {4, 1};
  BodyWriter writer(1);
  const uint32_t storage = writer.addInlineStorage(data.data(), 48, 0, -1);
  TensorRecord sent = record(layout, ownsStorage ? storage : kNowhere, children);
  sent.flags = kRequiresGrad | kCoalesced;
  sent.axis = 1;
  sent.scale = 0.25;
  sent.zeroPoint = -3;
  writer.addTensor(sent, sizes, ownsStorage ? std::span<const int64_t>(strides) : std::span<const int64_t>(), false);
  for (uint32_t child = 0; child < children; ++child) {
    writer.addTensor(record(Layout::kStrided, storage), sizes, strides, true);
  }
  const Bytes body = writer.finish();
  BodyView view;
  const Error error = readBody(body, {}, view);
  ASSERT_FALSE(error) << error.message();
  EXPECT_EQ(view.tensorCount, 1u);
  ASSERT_EQ(view.tensors.size(), 1u + children);
  const TensorRecord& received = view.tensors[0].record;
  EXPECT_EQ(received.layout, layout);
  EXPECT_EQ(received.flags, sent.flags);
  EXPECT_EQ(received.axis, 1);
  EXPECT_EQ(received.scale, 0.25);
  EXPECT_EQ(received.zeroPoint, -3);
  EXPECT_EQ(received.dims, 2u);
}

TEST_P(WireBodyLayoutTest, AnyOtherNumberOfChildrenIsRefused) {
  const auto [layout, children, ownsStorage] = GetParam();
  const std::vector<float> data(12, 2.0f);
  const std::vector<int64_t> sizes = {3, 4};
  const std::vector<int64_t> strides = {4, 1};
  for (const uint32_t lied : {0u, 1u, 2u, 3u, 4u, 0xFFFFFFFFu}) {
    if (lied == children) {
      continue;
    }
    BodyWriter writer(1);
    const uint32_t storage = writer.addInlineStorage(data.data(), 48, 0, -1);
    writer.addTensor(
        record(layout, ownsStorage ? storage : kNowhere, lied),
        sizes,
        ownsStorage ? std::span<const int64_t>(strides) : std::span<const int64_t>(),
        false);
    for (uint32_t child = 0; child < std::min(lied, 4u); ++child) {
      writer.addTensor(record(Layout::kStrided, storage), sizes, strides, true);
    }
    const Bytes body = writer.finish();
    BodyView view;
    EXPECT_EQ(readBody(body, {}, view).code(), ErrorCode::kProtocol) << lied;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    WireBodyLayoutTest,
    testing::Values(
        LayoutCase{Layout::kUndefined, 0, false},
        LayoutCase{Layout::kStrided, 0, true},
        LayoutCase{Layout::kSparseCoo, 2, false},
        LayoutCase{Layout::kSparseCsr, 3, false},
        LayoutCase{Layout::kSparseCsc, 3, false},
        LayoutCase{Layout::kSparseBsr, 3, false},
        LayoutCase{Layout::kSparseBsc, 3, false},
        LayoutCase{Layout::kQuantizedPerTensor, 0, true},
        LayoutCase{Layout::kQuantizedPerChannel, 2, true}),
    [](const auto& info) { return "Layout" + std::to_string(static_cast<int>(info.param.layout)); });

TEST(WireBodyTest, EveryTruncationIsRefused) {
  const Sample sample;
  for (size_t size = 0; size < sample.body.size(); ++size) {
    // Copy it into a block of exactly that size, so that a sanitizer sees a read past the end.
    const Bytes truncated(std::span<const std::byte>(sample.body).first(size));
    BodyView view;
    EXPECT_EQ(readBody(truncated, sample.spanBytes, view).code(), ErrorCode::kProtocol) << size;
  }
}

TEST(WireBodyTest, TrailingBytesAreRefused) {
  Sample sample;
  sample.body.append("\0\0\0\0\0\0\0", 8);
  BodyView view;
  EXPECT_EQ(sample.read(view).code(), ErrorCode::kProtocol);
}

TEST(WireBodyTest, UnalignedMemoryIsRefused) {
  const Sample sample;
  Bytes shifted(sample.body.size() + 1);
  std::memcpy(shifted.data() + 1, sample.body.data(), sample.body.size());
  BodyView view;
  EXPECT_TRUE(readBody(std::span<const std::byte>(shifted).subspan(1), sample.spanBytes, view));
}

TEST(WireBodyTest, SpansMustHaveTheSizesThatTheBodyGives) {
  Sample sample;
  for (const auto& spans : std::vector<std::vector<uint64_t>>{
           {}, {4000}, {4001, 8000}, {4000, 7999}, {8000, 4000}, {4000, 8000, 1}, {4000, 8000, 0}, {0, 0}}) {
    sample.spanBytes = spans;
    BodyView view;
    EXPECT_EQ(sample.read(view).code(), ErrorCode::kProtocol) << spans.size();
  }
}

template <typename Field>
std::function<void(Bytes&)> lieAt(size_t offset, Field value) {
  return [offset, value](Bytes& body) { std::memcpy(body.data() + offset, &value, sizeof(value)); };
}

struct Lie {
  std::string name;
  std::function<void(Bytes&)> tell;
};

std::vector<Lie> lies() {
  constexpr size_t kFirst = Sample::kTensors; // the strided tensor
  constexpr size_t kFirstSizes = kFirst + sizeof(TensorRecord);
  constexpr size_t kFirstStrides = kFirstSizes + 2 * sizeof(int64_t);
  constexpr size_t kCooSizes = Sample::kCoo + sizeof(TensorRecord);
  std::vector<Lie> lies;
  const auto add = [&lies](const std::string& name, size_t offset, auto... values) {
    (lies.push_back({name + " = " + std::to_string(values), lieAt(offset, values)}), ...);
  };
  add("tensors", offsetof(BodyPrefix, tensors), 0u, 2u, 4u, 5u, 0xFFFFFFFFu);
  add("tensorRecords", offsetof(BodyPrefix, tensorRecords), 0u, 4u, 6u, 0x7FFFFFFFu, 0xFFFFFFFFu);
  add("storages", offsetof(BodyPrefix, storages), 0u, 2u, 4u, 0x10000000u, 0xFFFFFFFFu);
  add("payloadBytes", offsetof(BodyPrefix, payloadBytes), 0ull, 5ull, 7ull, 1ull << 40, ~0ull);
  add("payloadSpan", offsetof(BodyPrefix, payloadSpan), 0u, 1u, 2u, 0xFFFFFFFEu);
  add("inline storage, bytes", Sample::kStorages, 0ull, 63ull, 65ull, 1ull << 40, 1ull << 63, ~0ull);
  add("inline storage, span", Sample::kStorages + offsetof(StorageRecord, span), 0u, 1u, 2u, 0xFFFFFFFEu);
  const size_t secondStorage = Sample::kStorages + sizeof(StorageRecord);
  add("span storage, bytes", secondStorage, 0ull, 4000ull, 7999ull, 8001ull, ~0ull);
  add("span storage, span", secondStorage + offsetof(StorageRecord, span), 0u, 2u, 0xFFFFFFFEu, kNowhere);
  add("layout", kFirst, uint8_t{0}, uint8_t{2}, uint8_t{3}, uint8_t{8}, uint8_t{9}, uint8_t{255});
  add("itemBytes", kFirst + offsetof(TensorRecord, itemBytes), uint8_t{0}, uint8_t{8}, uint8_t{255});
  add("dims", kFirst + offsetof(TensorRecord, dims), 0u, 1u, 3u, 0x10000000u, 0x7FFFFFFFu, 0xFFFFFFFFu);
  add("storage", kFirst + offsetof(TensorRecord, storage), 3u, 0x7FFFFFFFu, kNowhere);
  add("children", kFirst + offsetof(TensorRecord, children), 1u, 2u, 0xFFFFFFFFu);
  add("storageOffset", kFirst + offsetof(TensorRecord, storageOffset), int64_t{-1}, int64_t{9}, kMax, -kMax - 1);
  add("size", kFirstSizes, int64_t{-1}, int64_t{4}, int64_t{1} << 62, kMax, -kMax - 1);
  add("stride", kFirstStrides, int64_t{-1}, int64_t{12}, int64_t{1} << 62, kMax, -kMax - 1);
  add("layout of an undefined tensor", Sample::kUndefined, uint8_t{1}, uint8_t{2});
  add("storage of an undefined tensor", Sample::kUndefined + offsetof(TensorRecord, storage), 0u, 3u);
  add("children of an undefined tensor", Sample::kUndefined + offsetof(TensorRecord, children), 1u);
  add("layout of a sparse tensor", Sample::kCoo, uint8_t{0}, uint8_t{1}, uint8_t{3}, uint8_t{7}, uint8_t{8});
  add("storage of a sparse tensor", Sample::kCoo + offsetof(TensorRecord, storage), 0u, 3u);
  add("children of a sparse tensor", Sample::kCoo + offsetof(TensorRecord, children), 0u, 1u, 3u, 0xFFFFFFFFu);
  add("sizes of a sparse tensor", kCooSizes, int64_t{-1}, kMax, -kMax - 1);
  add("layout of a child", Sample::kIndices, uint8_t{0}, uint8_t{2}, uint8_t{7}, uint8_t{8});
  add("storage of a child", Sample::kIndices + offsetof(TensorRecord, storage), 0u, 2u, kNowhere);
  return lies;
}

TEST(WireBodyTest, EverySingleWrongFieldIsRefused) {
  for (const Lie& lie : lies()) {
    Sample sample;
    lie.tell(sample.body);
    BodyView view;
    const Error error = sample.read(view);
    EXPECT_EQ(error.code(), ErrorCode::kProtocol) << lie.name;
    EXPECT_NE(error.message().find("malformed message: "), std::string::npos) << lie.name;
  }
}

TEST(WireBodyTest, WrongCountsAllocateNothing) {
  Bytes body(sizeof(BodyPrefix));
  for (const uint32_t count : {1u << 20, 1u << 28, 0xFFFFFFFFu}) {
    BodyPrefix prefix{};
    prefix.payloadSpan = kNowhere;
    prefix.storages = count;
    std::memcpy(body.data(), &prefix, sizeof(prefix));
    BodyView view;
    EXPECT_TRUE(readBody(body, {}, view));
    EXPECT_EQ(view.storages.capacity(), 0u);

    prefix.storages = 0;
    prefix.tensorRecords = count;
    prefix.tensors = count;
    std::memcpy(body.data(), &prefix, sizeof(prefix));
    EXPECT_TRUE(readBody(body, {}, view));
    EXPECT_EQ(view.tensors.capacity(), 0u);
  }
}

TEST(WireBodyTest, ASpanIsUsedOnce) {
  const std::vector<uint64_t> spans = {4000};
  BodyView view;

  BodyWriter twoStorages(1);
  twoStorages.addSpanStorage(4000, 0, 0, -1);
  twoStorages.addSpanStorage(4000, 0, 0, -1);
  EXPECT_EQ(readBody(twoStorages.finish(), spans, view).code(), ErrorCode::kProtocol);

  BodyWriter storageAndPayload(1);
  storageAndPayload.addSpanStorage(4000, 0, 0, -1);
  storageAndPayload.setPayloadSpan(4000, 0);
  EXPECT_EQ(readBody(storageAndPayload.finish(), spans, view).code(), ErrorCode::kProtocol);
}

TEST(WireBodyTest, StoragesOfOneSpanLieInTheirOrder) {
  const std::vector<uint64_t> spans = {4000, 100};
  BodyWriter writer(1);
  writer.addSpanStorage(1500, 0, 0, -1);
  writer.addSpanStorage(100, 1, 0, -1);
  writer.addSpanStorage(2500, 0, 0, -1);
  const Bytes body = writer.finish();
  BodyView view;
  const Error error = readBody(body, spans, view);
  ASSERT_FALSE(error) << error.message();
  EXPECT_EQ(view.storages[0].spanOffset, 0u);
  EXPECT_EQ(view.storages[2].spanOffset, 1500u);
  EXPECT_TRUE(view.storages[0].isPacked);
  EXPECT_TRUE(view.storages[2].isPacked);
  EXPECT_EQ(view.storages[1].spanOffset, 0u);
  EXPECT_FALSE(view.storages[1].isPacked);
}

TEST(WireBodyTest, StoragesMustFillTheirSpan) {
  const std::vector<uint64_t> spans = {4000};
  for (const auto& storages : std::vector<std::vector<uint64_t>>{
           {1500, 2499}, {1500, 2501}, {4000, 0}, {0, 4000}, {1500, 2500, 0}, {1500, kMax}, {3999}}) {
    BodyWriter writer(1);
    for (const uint64_t bytes : storages) {
      writer.addSpanStorage(bytes, 0, 0, -1);
    }
    BodyView view;
    EXPECT_EQ(readBody(writer.finish(), spans, view).code(), ErrorCode::kProtocol) << testing::PrintToString(storages);
  }
}

TEST(WireBodyTest, APayloadSharesItsSpanWithNothing) {
  const std::vector<uint64_t> spans = {4000};
  BodyWriter writer(1);
  writer.addSpanStorage(1500, 0, 0, -1);
  writer.setPayloadSpan(2500, 0);
  BodyView view;
  EXPECT_EQ(readBody(writer.finish(), spans, view).code(), ErrorCode::kProtocol);
}

TEST(WireBodyTest, ASpanThatNothingRefersToIsRefused) {
  const std::vector<uint64_t> spans = {4000};
  BodyView view;
  EXPECT_EQ(readBody(BodyWriter(1).finish(), spans, view).code(), ErrorCode::kProtocol);
}

// The extent of a tensor in a storage of 10 floats.
struct Extent {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  bool fits;
};

TEST(WireBodyTest, TensorsStayInsideTheirStorage) {
  const Extent extents[] = {
      {{}, {}, 0, true}, // a scalar
      {{}, {}, 9, true},
      {{}, {}, 10, false},
      {{10}, {1}, 0, true},
      {{11}, {1}, 0, false},
      {{10}, {1}, 1, false},
      {{5}, {2}, 0, true},
      {{5}, {2}, 1, true},
      {{5}, {2}, 2, false},
      {{2, 5}, {5, 1}, 0, true},
      {{2, 5}, {6, 1}, 0, false},
      {{3, 3}, {0, 0}, 9, true}, // expanded
      {{1000000, 1000000}, {0, 0}, 0, true},
      {{0}, {1}, 0, true},
      {{0}, {1}, 10, true},
      {{0}, {1}, 11, false},
      {{5, 0, 7}, {kMax, 1, 1}, 0, false}, // overflows, although it has no elements
      {{1, 1}, {kMax, kMax}, 0, true}, // one element: strides do not matter
      {{2, 2}, {kMax, kMax}, 0, false},
      {{2}, {kMax}, kMax, false},
      {{kMax}, {0}, 0, true},
      {{kMax, 2}, {0, 0}, 0, false}, // more elements than an int64 can count
  };
  const std::vector<float> data(10);
  for (const Extent& extent : extents) {
    BodyWriter writer(1);
    const uint32_t storage = writer.addInlineStorage(data.data(), 40, 0, -1);
    writer.addTensor(record(Layout::kStrided, storage, 0, extent.offset), extent.sizes, extent.strides, false);
    const Bytes body = writer.finish();
    BodyView view;
    EXPECT_EQ(!readBody(body, {}, view), extent.fits)
        << testing::PrintToString(extent.sizes) << " by " << testing::PrintToString(extent.strides) << " at "
        << extent.offset;
  }
}

// If any single byte changes, the body is refused, or is still consistent.
TEST(WireBodyTest, ChangingOneByteCausesNoReadPastTheEnd) {
  const Sample sample;
  for (size_t at = 0; at < sample.body.size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xFF}) {
      Bytes changed{std::span<const std::byte>(sample.body)};
      changed.data()[at] ^= static_cast<std::byte>(flip);
      BodyView view;
      if (readBody(changed, sample.spanBytes, view)) {
        continue;
      }
      for (const BodyView::Tensor& tensor : view.tensors) {
        ASSERT_TRUE(tensor.record.storage == kNowhere || tensor.record.storage < view.storages.size());
      }
    }
  }
}

} // namespace
} // namespace torch_ucx_rpc::wire
