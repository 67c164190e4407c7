// A job with a secret over UCX, and a process that knows a worker's address and recorded bytes.

#include "stranger.h"
#include "sealed_job.h"
#include "transport/ucp/ucp_transport.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

namespace torch_ucx_rpc {
namespace {

// Returns the resident memory of this process.
uint64_t residentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

class StrangerTest : public ForgedFrameTest {
 protected:
  void SetUp() override {
    ForgedFrameTest::SetUp();
    path_ = testing::TempDir() + "shots-" + std::to_string(getpid());
    load();
  }
  void TearDown() override {
    std::filesystem::remove(path_);
    ForgedFrameTest::TearDown();
  }

  std::unique_ptr<Transport> makeTransport(worker_id_t /*rank*/) override {
    return makeUcpTransport(2);
  }

  // Begins a new file for the stranger.
  void load() {
    const std::string& address = agent(0).address();
    shots_.open(path_, std::ios::binary | std::ios::trunc);
    write(uint64_t{address.size()});
    shots_.write(address.data(), static_cast<std::streamsize>(address.size()));
  }
  void shoot(
      const wire::Header& header,
      std::span<const std::byte> data = {},
      uint32_t times = 1,
      SendMode mode = SendMode::kEager) {
    write(Shot{header, data.size(), times, mode});
    shots_.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
    expected_ += times;
  }

  // Runs the stranger. Returns false if it could not send all frames.
  [[nodiscard]] bool runStranger() {
    shots_.close();
    std::string program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "stranger";
    char* const arguments[] = {program.data(), path_.data(), nullptr};
    pid_t child = 0;
    EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0) << program;
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  bool areRefused(uint64_t frames) {
    return eventually([&] { return metric(0, "agent.frames_refused") == frames; });
  }
  template <typename T>
  void write(const T& value) {
    shots_.write(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  std::string path_;
  std::ofstream shots_;
  uint64_t expected_ = 0; // frames
};

TEST_F(StrangerTest, ForgedFramesAreRefused) {
  const Bytes body = bodyOfRequest("forged");
  for (int kind = 1; kind <= static_cast<int>(wire::Kind::kPutRefused); ++kind) {
    shoot(frame(static_cast<wire::Kind>(kind)), body);
    shoot(frame(static_cast<wire::Kind>(kind)), body, 1, SendMode::kRendezvous);
  }
  wire::Header lie = frame(wire::Kind::kRequest);
  wire::FrameSeal("a guess").sealFrame(lie, body.size(), body);
  shoot(lie, body);
  lie = frame(wire::Kind::kRequest);
  lie.version = 1;
  shoot(lie, body);
  lie = frame(wire::Kind::kRequest);
  lie.magic = 0;
  shoot(lie, body);
  lie = frame(wire::Kind::kRequest);
  lie.sourceSession ^= 1;
  shoot(lie, body);
  lie = frame(wire::Kind::kRequest);
  lie.targetSession ^= 1;
  shoot(lie, body);
  lie = frame(wire::Kind::kRequest);
  lie.spanCount = 0xFFFFFFFF;
  shoot(lie, body);
  EXPECT_TRUE(runStranger());
  EXPECT_TRUE(areRefused(expected_)) << metric(0, "agent.frames_refused") << " of " << expected_;
  EXPECT_EQ(handled_.load(), 0);
  EXPECT_EQ(textOf(*answer(call(1, 0, "ok"))), "ok");
  EXPECT_EQ(textOf(*answer(call(0, 1, "ok"))), "ok");
}

TEST_F(StrangerTest, RecordedFramesAreTakenAtMostOnce) {
  const Bytes body = bodyOfRequest("recorded");
  wire::Header header = frame(wire::Kind::kRequest);
  header.sequence = 1;
  wire::FrameSeal(keyOf(1, 0)).sealFrame(header, body.size(), body); // the same bytes as from worker 1
  shoot(header, body, 50);
  EXPECT_TRUE(runStranger());
  EXPECT_TRUE(areRefused(49));
  EXPECT_TRUE(eventually([&] { return handled_.load() == 1; })) << "the first of them was genuine";
}

TEST_F(StrangerTest, AFloodCostsNoMemory) {
  const Bytes large(64 * kKiB);
  const Bytes spanBytes(kMiB);
  wire::Header header = frame(wire::Kind::kRequest);
  header.spanCount = 2;
  wire::Header span = header;
  span.index = 0;
  // First let UCX take its own memory for a process that connects.
  shoot(header, large, 200);
  shoot(span, spanBytes, 200, SendMode::kRendezvous);
  ASSERT_TRUE(runStranger());
  ASSERT_TRUE(areRefused(expected_));
  const uint64_t before = residentBytes();

  load();
  shoot(header, large, 5'000); // 312 MiB
  shoot(span, spanBytes, 5'000, SendMode::kRendezvous); // 4.9 GiB, of which none is fetched
  std::atomic<bool> isOver{false};
  uint64_t answered = 0;
  std::thread stranger([&] {
    EXPECT_TRUE(runStranger());
    isOver.store(true);
  });
  while (!isOver.load()) {
    EXPECT_EQ(textOf(*answer(call(1, 0, "meanwhile"))), "meanwhile");
    ++answered;
  }
  stranger.join();
  EXPECT_TRUE(areRefused(expected_));
  EXPECT_GT(answered, 0u);
  EXPECT_EQ(static_cast<uint64_t>(handled_.load()), answered);
  EXPECT_LT(residentBytes(), before + 64 * kMiB);
}

} // namespace
} // namespace torch_ucx_rpc
