#include "base/bytes.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace torch_ucx_rpc {
namespace {

std::string textOf(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(BytesTest, IsEmptyAtFirst) {
  const Bytes bytes;
  EXPECT_EQ(bytes.size(), 0u);
  EXPECT_TRUE(std::span<const std::byte>(bytes).empty());
}

TEST(BytesTest, AppendKeepsTheContents) {
  Bytes bytes;
  std::string expected;
  for (int round = 0; round < 1000; ++round) {
    const std::string more(static_cast<size_t>(round % 17), static_cast<char>('a' + round % 26));
    bytes.append(more.data(), more.size());
    expected += more;
  }
  EXPECT_EQ(textOf(bytes), expected);
}

TEST(BytesTest, AppendOfNothingNeedsNoPointer) {
  Bytes bytes;
  bytes.append(nullptr, 0);
  EXPECT_EQ(bytes.size(), 0u);
}

TEST(BytesTest, GrowingBySmallStepsMovesRarely) {
  Bytes bytes;
  int moves = 0;
  const std::byte* before = nullptr;
  for (int step = 0; step < 100'000; ++step) {
    bytes.append("x", 1);
    moves += bytes.data() != before ? 1 : 0;
    before = bytes.data();
  }
  EXPECT_LE(moves, 20);
}

TEST(BytesTest, ReservedRoomIsNotMovedWhenFilled) {
  Bytes bytes;
  bytes.reserve(1000);
  bytes.append("x", 1);
  const std::byte* const at = bytes.data();
  bytes.resizeUninitialized(1000);
  EXPECT_EQ(bytes.data(), at);
  EXPECT_EQ(static_cast<char>(*bytes.data()), 'x');
}

TEST(BytesTest, ShrinkingKeepsTheFront) {
  Bytes bytes(std::as_bytes(std::span("abcdef", 6)));
  bytes.resizeUninitialized(3);
  EXPECT_EQ(textOf(bytes), "abc");
}

TEST(BytesTest, MovedFromIsEmptyAndUsable) {
  Bytes first(std::as_bytes(std::span("abc", 3)));
  Bytes second(std::move(first));
  EXPECT_EQ(textOf(second), "abc");
  EXPECT_EQ(first.size(), 0u); // NOLINT(bugprone-use-after-move): what it is after a move is the subject
  first.append("de", 2);
  EXPECT_EQ(textOf(first), "de");
  first = std::move(second);
  EXPECT_EQ(textOf(first), "abc");
  EXPECT_EQ(second.size(), 0u); // NOLINT(bugprone-use-after-move)
}

TEST(BytesTest, ImpossibleSizesThrowAndChangeNothing) {
  Bytes bytes(std::as_bytes(std::span("abc", 3)));
  EXPECT_THROW(bytes.reserve(std::numeric_limits<size_t>::max() / 2), std::bad_alloc);
  EXPECT_EQ(textOf(bytes), "abc");
}

} // namespace
} // namespace torch_ucx_rpc
