// UCX's lines about a reported failure become part of its error, and are not printed.

#include "transport/ucp/ucx_log.h"
#include "eventually.h"
#include "outcome.h"
#include "ucp_lanes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <regex>
#include <string>

namespace torch_ucx_rpc {
namespace {

constexpr const char* kAddressFile = "TORCH_UCX_RPC_TEST_ADDRESS_FILE";
constexpr const char* kLanes = "TORCH_UCX_RPC_TEST_LANES";

class Listener final : public TransportListener {
 public:
  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {}
  void onRendezvous(std::span<const std::byte> /*header*/, void* /*rendezvous*/, uint64_t /*bytes*/) override {}
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& error) override {
    why = error.message();
  }

  std::string why;
};

// The process that dies in the tests below: this program again, with only this test.
TEST(UcxLogTest, DISABLED_Victim) {
  const std::unique_ptr<Transport> transport = makeUcpTransportOver(std::getenv(kLanes));
  const std::string path = std::getenv(kAddressFile);
  std::ofstream(path + ".part", std::ios::binary) << transport->address();
  std::filesystem::rename(path + ".part", path);
  pause();
}

// Starts this program again, to run one test that is disabled otherwise.
pid_t runThisProgram(const std::string& test) {
  std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::string filter = "--gtest_filter=*" + test;
  std::string disabled = "--gtest_also_run_disabled_tests";
  const std::array<char*, 4> arguments{program.data(), filter.data(), disabled.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments.data(), environ), 0);
  return child;
}

// Returns the address of a worker whose process has been killed.
std::string addressOfDead(const std::string& lanes) {
  const std::string path = testing::TempDir() + "address-" + std::to_string(getpid());
  setenv(kAddressFile, path.c_str(), 1);
  setenv(kLanes, lanes.c_str(), 1);
  const pid_t victim = runThisProgram("UcxLogTest.DISABLED_Victim");
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(path); }));
  std::ifstream file(path, std::ios::binary);
  std::string address(std::istreambuf_iterator<char>(file), {});
  std::filesystem::remove(path);
  kill(victim, SIGKILL);
  waitpid(victim, nullptr, 0);
  return address;
}

class UcxLogOfTheDeadTest : public testing::TestWithParam<const char*> {
 protected:
  // Sends a message to the address. Returns the reason of the failure.
  std::string sendTo(const std::string& address) {
    EndpointId endpoint = 0;
    if (const Error error = transport_->connect(address, endpoint)) {
      return error.message();
    }
    Outcome outcome;
    const wire::Header header{};
    transport_->send(endpoint, header, {}, SendMode::kEager, outcome.callback());
    EXPECT_TRUE(eventually([&] {
      transport_->progress();
      return !listener_.why.empty();
    }));
    return listener_.why;
  }

  Listener listener_;
  std::unique_ptr<Transport> transport_;
};

TEST_P(UcxLogOfTheDeadTest, FailureToReachADeadWorkerIsNotPrinted) {
  const std::string dead = addressOfDead(GetParam());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  transport_ = makeUcpTransportOver(GetParam());
  transport_->setListener(&listener_);
  const std::string why = sendTo(dead);
  transport_.reset();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_TRUE(std::regex_search(why, std::regex(R"(^UCX: [A-Z][a-z ]+ \(\w+\.c:\d+: .*\)$)"))) << why;
}

INSTANTIATE_TEST_SUITE_P(Lanes, UcxLogOfTheDeadTest, testing::Values("sysv,self", "posix,self", "tcp,self", ""));

// A process that calls a dead worker, with the log level that the user has set for UCX.
TEST_P(UcxLogOfTheDeadTest, DISABLED_Reacher) {
  const std::string dead = addressOfDead(GetParam());
  transport_ = makeUcpTransportOver(GetParam());
  transport_->setListener(&listener_);
  EXPECT_NE(sendTo(dead), "");
}

TEST(UcxLogTest, LevelThatTheUserHasSetShowsAllLines) {
  setenv("UCX_LOG_LEVEL", "error", 1);
  testing::internal::CaptureStdout();
  const pid_t reacher = runThisProgram("DISABLED_Reacher/0");
  int status = -1;
  waitpid(reacher, &status, 0);
  unsetenv("UCX_LOG_LEVEL");
  EXPECT_NE(testing::internal::GetCapturedStdout().find("UCX  ERROR"), std::string::npos);
  EXPECT_EQ(status, 0);
}

void say(ucs_log_level_t level, const char* what) {
  ucs_log_dispatch("/src/some.c", 7, "function", level, &ucs_global_opts.log_component, "%s", what);
}

// Returns the text that `printing` prints.
std::string printedBy(const std::function<void()>& printing) {
  testing::internal::CaptureStdout();
  printing();
  ucs_log_flush();
  return testing::internal::GetCapturedStdout();
}

TEST(UcxLogTest, LinesOfOthersAreShownAtOnce) {
  const UcxLog log;
  EXPECT_NE(printedBy([] { say(UCS_LOG_LEVEL_ERROR, "of another"); }).find("of another"), std::string::npos);
}

TEST(UcxLogTest, WarningsAreShownAtOnce) {
  UcxLog log;
  const UcxLog::Working working(log);
  EXPECT_NE(printedBy([] { say(UCS_LOG_LEVEL_WARN, "a warning"); }).find("a warning"), std::string::npos);
}

TEST(UcxLogTest, WarningsOfRequestsThatAreLeftBehindAreDropped) {
  UcxLog log;
  const auto sayBoth = [] {
    say(UCS_LOG_LEVEL_WARN, "a request");
    say(UCS_LOG_LEVEL_ERROR, "an error");
  };
  const std::string leaving = printedBy([&] {
    const UcxLog::Working guard(log, /*isLeaving=*/true);
    sayBoth();
  });
  EXPECT_EQ(leaving.find("a request"), std::string::npos);
  EXPECT_NE(leaving.find("an error"), std::string::npos);
  EXPECT_NE(printedBy(sayBoth).find("a request"), std::string::npos) << "the guard is gone";
}

TEST(UcxLogTest, FailureTakesTheFirstLineOnce) {
  UcxLog log;
  const UcxLog::Working working(log);
  EXPECT_EQ(log.takeReason(), "");
  EXPECT_EQ(
      printedBy([] {
        say(UCS_LOG_LEVEL_ERROR, "the cause");
        say(UCS_LOG_LEVEL_ERROR, "what followed");
      }),
      "");
  EXPECT_EQ(log.takeReason(), " (some.c:7: the cause)");
  EXPECT_EQ(log.takeReason(), "");
}

TEST(UcxLogTest, LineThatNothingExplainsIsShownAfterASecond) {
  UcxLog log;
  const UcxLog::Working working(log);
  EXPECT_EQ(
      printedBy([&] {
        say(UCS_LOG_LEVEL_ERROR, "unexplained");
        log.showOld();
      }),
      "");
  std::string shown;
  EXPECT_TRUE(eventually([&] {
    shown += printedBy([&] { log.showOld(); });
    return !shown.empty();
  }));
  EXPECT_NE(shown.find("some.c:7"), std::string::npos) << shown;
  EXPECT_NE(shown.find("UCX  ERROR unexplained"), std::string::npos) << shown;
}

TEST(UcxLogTest, LinesBeforeAndAfterAFailureAreNotShown) {
  UcxLog log;
  const UcxLog::Working working(log);
  EXPECT_EQ(
      printedBy([&] {
        say(UCS_LOG_LEVEL_ERROR, "before");
        log.explain();
        say(UCS_LOG_LEVEL_ERROR, "after");
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1100);
        EXPECT_TRUE(eventually([&] {
          log.showOld();
          return std::chrono::steady_clock::now() > end;
        }));
      }),
      "");
}

TEST(UcxLogTest, LinesForWhichThereIsNoRoomAreShownAtOnce) {
  UcxLog log;
  const UcxLog::Working working(log);
  const std::string shown = printedBy([] {
    for (int line = 0; line < 20; ++line) {
      say(UCS_LOG_LEVEL_ERROR, ("line " + std::to_string(line)).c_str());
    }
  });
  EXPECT_EQ(shown.find("line 1\n"), std::string::npos) << shown;
  EXPECT_NE(shown.find("line 19\n"), std::string::npos) << shown;
}

} // namespace
} // namespace torch_ucx_rpc
