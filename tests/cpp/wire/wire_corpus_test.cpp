// Runs the fuzz target on its seed corpus without libFuzzer, so any compiler checks old findings.

#include "../../fuzz/wire_fuzzer.cpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace {

TEST(WireCorpusTest, EverySeedIsRead) {
  size_t seeds = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TORCH_UCX_RPC_FUZZ_CORPUS)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++seeds;
  }
  EXPECT_GT(seeds, 10u);
}

TEST(WireCorpusTest, SeedsAreOfThisVersion) {
  std::ifstream file(std::filesystem::path(TORCH_UCX_RPC_FUZZ_CORPUS) / "inline_tensor", std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Input input(std::as_bytes(std::span(bytes)));
  ASSERT_EQ(input.read<uint8_t>(), 0);
  Header header;
  ASSERT_FALSE(readHeader(input.take(sizeof(Header)), header)) << "run tests/fuzz/seeds.py";
  const Bytes body(input.take(input.read<uint16_t>()));
  BodyView view;
  ASSERT_FALSE(readBody(body, {}, view)) << "run tests/fuzz/seeds.py";
  EXPECT_EQ(view.tensors.size(), 1u);
}

} // namespace
