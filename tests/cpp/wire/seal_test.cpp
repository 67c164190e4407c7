#include "wire/seal.h"
#include "base/bytes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <string_view>

namespace torch_ucx_rpc::wire {
namespace {

const std::string kKey(32, 'k');

std::span<const std::byte> bytesOf(std::string_view text) {
  return std::as_bytes(std::span(text));
}

class SealTest : public testing::Test {
 protected:
  // A body that travels with its header.
  Header sealed(std::string_view body) {
    Header header;
    header.sourceRank = 3;
    header.sourceSession = 11;
    header.targetSession = 12;
    header.callId = 13;
    header.spanCount = 2;
    sealer_.sealFrame(header, body.size(), bytesOf(body));
    return header;
  }

  FrameSeal sealer_{kKey};
  FrameSeal opener_{kKey};
};

TEST_F(SealTest, SealedFramesAreGenuine) {
  for (const std::string& body : {std::string(), std::string("body"), std::string(100'000, 'x')}) {
    EXPECT_TRUE(opener_.isGenuine(sealed(body), body.size(), bytesOf(body)));
  }
}

TEST_F(SealTest, EveryBitOfTheHeaderIsCovered) {
  const Header header = sealed("body");
  for (size_t bit = 0; bit < 8 * sizeof(Header); ++bit) {
    std::byte changed[sizeof(Header)];
    std::memcpy(changed, &header, sizeof(Header));
    changed[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
    Header read;
    std::memcpy(&read, changed, sizeof(Header));
    EXPECT_FALSE(opener_.isGenuine(read, 4, bytesOf("body"))) << "bit " << bit;
  }
}

TEST_F(SealTest, EveryByteOfTheBodyIsCovered) {
  const std::string body(500, 'b');
  const Header header = sealed(body);
  for (size_t at = 0; at < body.size(); ++at) {
    std::string changed = body;
    changed[at] = 'c';
    EXPECT_FALSE(opener_.isGenuine(header, changed.size(), bytesOf(changed))) << at;
  }
  EXPECT_FALSE(opener_.isGenuine(header, 499, bytesOf(body.substr(1))));
  EXPECT_FALSE(opener_.isGenuine(header, 501, bytesOf(body + 'b')));
  EXPECT_FALSE(opener_.isGenuine(header, 500, {})) << "announced, not sent along";
}

TEST_F(SealTest, AnnouncedLengthIsCovered) {
  Header header;
  sealer_.sealFrame(header, 1'000'000, {});
  EXPECT_TRUE(opener_.isGenuine(header, 1'000'000, {}));
  EXPECT_FALSE(opener_.isGenuine(header, 1'000'001, {}));
}

TEST_F(SealTest, ContentStaysGenuineOverAnotherEndpoint) {
  Header header = sealed("body");
  sealContent(kKey, header, {}, bytesOf("payload"));
  header.endpoint = 2;
  EXPECT_TRUE(isContentGenuine(kKey, header, {}, bytesOf("payload")));
}

TEST_F(SealTest, AnotherKeyOpensNothing) {
  std::string other = kKey;
  other.back() ^= 1;
  EXPECT_FALSE(FrameSeal(other).isGenuine(sealed("body"), 4, bytesOf("body")));
  Header unsealed;
  EXPECT_FALSE(opener_.isGenuine(unsealed, 0, {})) << "a tag of zeros";
}

TEST_F(SealTest, ContentIsGenuineOnlyWhereItBelongs) {
  Header header = sealed("");
  sealContent(kKey, header, bytesOf("large body"), bytesOf("large payload"));
  EXPECT_TRUE(isContentGenuine(kKey, header, bytesOf("large body"), bytesOf("large payload")));
  EXPECT_FALSE(isContentGenuine(kKey, header, bytesOf("large bodY"), bytesOf("large payload")));
  EXPECT_FALSE(isContentGenuine(kKey, header, bytesOf("large body"), bytesOf("large payloaD")));
  EXPECT_FALSE(isContentGenuine(kKey, header, bytesOf("large bodyl"), bytesOf("arge payload"))) << "shifted";
  EXPECT_FALSE(isContentGenuine(kKey, header, {}, {}));
  Header another = sealed("");
  another.callId = header.callId + 1;
  another.contentTag = header.contentTag;
  EXPECT_FALSE(isContentGenuine(kKey, another, bytesOf("large body"), bytesOf("large payload")));
}

TEST_F(SealTest, ContentTagIsCoveredByTheFrameTag) {
  Header header;
  sealContent(kKey, header, bytesOf("body"), {});
  sealer_.sealFrame(header, 4, {});
  EXPECT_TRUE(opener_.isGenuine(header, 4, {}));
  header.contentTag[15] ^= std::byte{1};
  EXPECT_FALSE(opener_.isGenuine(header, 4, {}));
}

} // namespace
} // namespace torch_ucx_rpc::wire
