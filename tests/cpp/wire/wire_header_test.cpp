#include "wire/header.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace torch_ucx_rpc::wire {
namespace {

Error read(const Header& sent, Header& received) {
  return readHeader(std::as_bytes(std::span(&sent, 1)), received);
}

TEST(WireHeaderTest, EveryFieldArrives) {
  Header sent;
  sent.kind = Kind::kResponse;
  sent.sourceRank = 0x0102;
  sent.endpoint = 0x0304;
  sent.sourceSession = 0x1112131415161718;
  sent.targetSession = 0x2122232425262728;
  sent.callId = 0x3132333435363738;
  sent.index = 2;
  sent.spanCount = 3;
  sent.sequence = 0x4142434445464748;
  sent.place = {0x5152535455565758, 0x6162636465666768};
  sent.deadlineMs = 0x71727374;
  sent.frameTag.fill(std::byte{0x61});
  Header received;
  ASSERT_FALSE(read(sent, received));
  EXPECT_EQ(std::memcmp(&sent, &received, sizeof(Header)), 0);
}

TEST(WireHeaderTest, LayoutMatchesTheDrawing) {
  Header header;
  header.kind = Kind::kCancel;
  header.sourceRank = 0x2211;
  header.endpoint = 0x4433;
  header.index = kBodyIndex;
  header.spanCount = 7;
  header.sequence = 0x81;
  header.contentTag[0] = std::byte{0x82};
  header.deadlineMs = 0x74;
  header.frameTag[0] = std::byte{0x83};
  const auto* bytes = reinterpret_cast<const unsigned char*>(&header);
  EXPECT_EQ(bytes[0], 'U');
  EXPECT_EQ(bytes[1], 'X');
  EXPECT_EQ(bytes[2], kVersion);
  EXPECT_EQ(bytes[3], 3);
  EXPECT_EQ(bytes[4], 0x11);
  EXPECT_EQ(bytes[6], 0x33);
  EXPECT_EQ(bytes[7], 0x44);
  EXPECT_EQ(bytes[32], 0xFF);
  EXPECT_EQ(bytes[36], 7);
  EXPECT_EQ(bytes[40], 0x81);
  EXPECT_EQ(bytes[48], 0x82);
  EXPECT_EQ(bytes[64], 0x74);
  EXPECT_EQ(bytes[68], 0);
  EXPECT_EQ(bytes[72], 0x83);
  header.place = {0x91, 0x92};
  EXPECT_EQ(bytes[48], 0x91);
  EXPECT_EQ(bytes[56], 0x92);
}

TEST(WireHeaderTest, EveryKindIsAcceptedWithoutSpans) {
  for (const Kind kind :
       {Kind::kRequest,
        Kind::kResponse,
        Kind::kCancel,
        Kind::kGoodbye,
        Kind::kBarrierArrive,
        Kind::kBarrierRelease,
        Kind::kJoin,
        Kind::kLeave,
        Kind::kAcknowledge,
        Kind::kPing,
        Kind::kPong,
        Kind::kRefused,
        Kind::kUseNetwork,
        Kind::kReceived,
        Kind::kPut,
        Kind::kTaken,
        Kind::kPutRefused}) {
    Header sent;
    sent.kind = kind;
    Header received;
    EXPECT_FALSE(read(sent, received)) << static_cast<int>(kind);
  }
}

TEST(WireHeaderTest, EveryOtherLengthIsRefused) {
  const std::vector<std::byte> bytes(2 * sizeof(Header));
  Header valid;
  std::vector<std::byte> frame(bytes);
  std::memcpy(frame.data(), &valid, sizeof(valid));
  Header received;
  for (size_t size = 0; size <= frame.size(); ++size) {
    const Error error = readHeader({frame.data(), size}, received);
    EXPECT_EQ(static_cast<bool>(error), size != sizeof(Header)) << size;
  }
}

struct Lie {
  const char* name;
  std::function<void(Header&)> tell;
};

TEST(WireHeaderTest, WrongFieldsAreRefused) {
  const Lie lies[] = {
      {"magic", [](Header& header) { header.magic = 0x5856; }},
      {"older version", [](Header& header) { header.version = 0; }},
      {"newer version", [](Header& header) { header.version = kVersion + 1; }},
      {"kind 0", [](Header& header) { header.kind = static_cast<Kind>(0); }},
      {"kind beyond the last", [](Header& header) { header.kind = static_cast<Kind>(18); }},
      {"kind 255", [](Header& header) { header.kind = static_cast<Kind>(255); }},
      {"more spans than allowed", [](Header& header) { header.spanCount = kMaxSpans + 1; }},
      {"spans without number", [](Header& header) { header.spanCount = 0xFFFFFFFF; }},
      {"a span of none", [](Header& header) { header.index = 0; }},
      {"a span past the last",
       [](Header& header) {
         header.index = 3;
         header.spanCount = 3;
       }},
      {"a piece past the end of its span",
       [](Header& header) {
         header.index = 2;
         header.spanCount = 3;
         header.place = {100, 100};
       }},
      {"a cancellation with spans",
       [](Header& header) {
         header.kind = Kind::kCancel;
         header.spanCount = 1;
       }},
      {"a goodbye with spans",
       [](Header& header) {
         header.kind = Kind::kGoodbye;
         header.spanCount = 1;
       }},
      {"a barrier frame with spans",
       [](Header& header) {
         header.kind = Kind::kBarrierArrive;
         header.spanCount = 1;
       }},
      {"a cancellation that is a span",
       [](Header& header) {
         header.kind = Kind::kCancel;
         header.index = 0;
       }},
  };
  for (const Lie& lie : lies) {
    Header sent;
    lie.tell(sent);
    Header received;
    const Error error = read(sent, received);
    EXPECT_EQ(error.code(), ErrorCode::kProtocol) << lie.name;
    EXPECT_FALSE(error.message().empty()) << lie.name;
  }
}

TEST(WireHeaderTest, AnotherVersionGivesOneLineWithBothNumbersAndTheCure) {
  Header sent;
  sent.version = 9;
  Header received;
  for (const size_t length : {size_t{4}, size_t{40}, sizeof(Header)}) { // other versions have other lengths
    const std::string message = readHeader(std::as_bytes(std::span(&sent, 1)).first(length), received).message();
    EXPECT_NE(message.find("version 9"), std::string::npos) << message;
    EXPECT_NE(message.find("version " + std::to_string(kVersion)), std::string::npos) << message;
    EXPECT_NE(message.find("install the same torch_ucx_rpc"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

} // namespace
} // namespace torch_ucx_rpc::wire
