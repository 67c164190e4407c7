#include "base/hmac.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

namespace torch_ucx_rpc {
namespace {

std::span<const std::byte> bytesOf(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hexOf(const Hmac::Tag& tag) {
  std::string hex;
  for (const std::byte byte : tag) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", std::to_integer<unsigned>(byte));
    hex += digits;
  }
  return hex;
}

// The first halves of the test vectors 1, 2 and 6 of RFC 4231.
TEST(HmacTest, MatchesTheVectorsOfTheRfc) {
  EXPECT_EQ(hexOf(Hmac(std::string(20, '\x0b')).of({bytesOf("Hi There")})), "b0344c61d8db38535ca8afceaf0bf12b");
  EXPECT_EQ(hexOf(Hmac("Jefe").of({bytesOf("what do ya want for nothing?")})), "5bdcc146bf60754e6a042426089575c7");
  EXPECT_EQ(
      hexOf(Hmac(std::string(131, '\xaa')).of({bytesOf("Test Using Larger Than Block-Size Key - Hash Key First")})),
      "60e431591ee0b67f0d8a26aacbf5b77f");
}

TEST(HmacTest, TagOfPartsIsTheTagOfTheWhole) {
  Hmac hmac("Jefe");
  const Hmac::Tag whole = hmac.of({bytesOf("what do ya want for nothing?")});
  EXPECT_EQ(hmac.of({bytesOf("what do ya "), {}, bytesOf("want for nothing?")}), whole) << "an Hmac can be used again";
}

TEST(HmacTest, TagsAreEqualOnlyIfEveryByteIsEqual) {
  Hmac hmac("key");
  const Hmac::Tag tag = hmac.of({});
  EXPECT_TRUE(Hmac::areEqual(tag, hmac.of({})));
  for (size_t at = 0; at < tag.size(); ++at) {
    Hmac::Tag other = tag;
    other[at] ^= std::byte{0x10};
    EXPECT_FALSE(Hmac::areEqual(tag, other)) << at;
  }
}

} // namespace
} // namespace torch_ucx_rpc
