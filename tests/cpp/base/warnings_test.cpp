#include "base/warnings.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

using Sentences = std::vector<std::string>;

class WarningsTest : public testing::Test {
 protected:
  ~WarningsTest() override {
    setWarningReceiver({});
  }

  void receive() {
    setWarningReceiver([this](const std::string& sentence) {
      const std::lock_guard lock(mutex_);
      received_.push_back(sentence);
      threads_.push_back(std::this_thread::get_id());
    });
  }

  std::mutex mutex_; // the test holds it to make the receiver hang
  Sentences received_;
  std::vector<std::thread::id> threads_;
};

TEST_F(WarningsTest, GoToStderrWithoutAReceiver) {
  testing::internal::CaptureStderr();
  warn("the disk is on fire");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("torch_ucx_rpc: the disk is on fire"), std::string::npos) << text;
}

TEST_F(WarningsTest, GoToTheReceiverInTheirOrderOnAThreadOfTheirOwn) {
  receive();
  testing::internal::CaptureStderr();
  warn("first");
  warn("second");
  flushWarnings();
  warn("third");
  flushWarnings();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(received_, (Sentences{"first", "second", "third"}));
  for (const std::thread::id thread : threads_) {
    EXPECT_NE(thread, std::this_thread::get_id());
  }
}

TEST_F(WarningsTest, DoNotWaitForAReceiverThatHangs) {
  receive();
  {
    const std::lock_guard hangs(mutex_);
    for (int number = 0; number < 1500; ++number) {
      warn(std::to_string(number));
    }
  }
  flushWarnings();
  // Beside the waiting warnings, one may have been on its way to the receiver.
  EXPECT_GE(received_.size(), 1000u);
  EXPECT_LE(received_.size(), 1001u);
  EXPECT_NE(received_.back().find("warnings after this one are lost"), std::string::npos) << received_.back();
}

TEST_F(WarningsTest, ReachTheOldReceiverBeforeItIsReplaced) {
  receive();
  warn("early");
  setWarningReceiver({});
  EXPECT_EQ(received_, Sentences{"early"});
}

TEST_F(WarningsTest, AreDeliveredInAForkedProcess) {
  receive();
  const pid_t child = fork();
  if (child == 0) {
    warn("in the child");
    flushWarnings();
    _exit(received_ == Sentences{"in the child"} ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

} // namespace
} // namespace torch_ucx_rpc
