#include "wire/put.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace torch_ucx_rpc::wire {
namespace {

Bytes bodyOf(const std::string& before, const PutName& name) {
  Bytes body;
  body.append(before.data(), before.size());
  appendPutName(body, name);
  return body;
}

TEST(PutTest, NameIsReadAsItWasWritten) {
  for (const std::string& before : {std::string(), std::string("the body of a message")}) {
    const Bytes body = bodyOf(before, {"group", 7, "tag", kSingle});
    PutName name;
    size_t bodyBytes = 0;
    ASSERT_FALSE(readPutName(body, name, bodyBytes));
    EXPECT_EQ(bodyBytes, before.size());
    EXPECT_EQ(name.group, "group");
    EXPECT_EQ(name.epoch, 7u);
    EXPECT_EQ(name.tag, "tag");
    EXPECT_EQ(name.flags, kSingle);
  }
}

TEST(PutTest, EveryShorterBodyIsRefusedOrRead) {
  const Bytes body = bodyOf("", {"group", 7, "tag", 0});
  for (size_t size = 0; size < body.size(); ++size) {
    PutName name;
    size_t bodyBytes = 0;
    if (!readPutName(std::span(body.data(), size), name, bodyBytes)) {
      EXPECT_LE(bodyBytes, size);
      EXPECT_LE(name.group.size() + name.tag.size(), size);
    }
  }
}

TEST(PutTest, NamesLongerThanTheirBodyAreRefused) {
  PutTrailer trailer{1, 0xFFFFFFFF, 0xFFFFFFFF, 0, 0};
  Bytes body;
  body.append(&trailer, sizeof(trailer));
  PutName name;
  size_t bodyBytes = 0;
  EXPECT_EQ(readPutName(body, name, bodyBytes).code(), ErrorCode::kProtocol);
}

} // namespace
} // namespace torch_ucx_rpc::wire
