#include "peers/process_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

// Returns field 22 of /proc/PID/stat. The name of a test binary has no blanks.
uint64_t startTimeOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string field;
  for (int number = 1; number <= 22; ++number) {
    file >> field;
  }
  return std::stoull(field);
}

Member memberOf(pid_t pid) {
  Member member;
  member.pid = pid;
  member.bootId = "this boot";
  member.pidNamespace = 1;
  member.processStartTime = startTimeOf(pid);
  return member;
}

// A process that lives until this process closes its end of a pipe.
class Child {
 public:
  Child() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[1]);
      char byte = 0;
      (void)!read(ends[0], &byte, 1); // until the other end is closed
      _exit(0);
    }
    close(ends[0]);
    leash_ = ends[1];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    letGo();
    reap();
  }

  pid_t pid() const {
    return pid_;
  }
  void letGo() {
    if (leash_ >= 0) {
      close(std::exchange(leash_, -1));
    }
  }
  void reap() {
    if (!std::exchange(isReaped_, true)) {
      EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_);
    }
  }

 private:
  pid_t pid_ = 0;
  int leash_ = -1;
  bool isReaped_ = false;
};

class ProcessWatchTest : public testing::Test {
 protected:
  bool isReadable(int timeoutMs) const {
    pollfd event{watched_.at(0).first, POLLIN, 0};
    return poll(&event, 1, timeoutMs) == 1;
  }

  std::vector<std::pair<int, UniqueFunction<void()>>> watched_;
  ProcessWatch watch_{
      [this](int fd, UniqueFunction<void()> onReadable) { watched_.emplace_back(fd, std::move(onReadable)); }};
  const Member self_ = memberOf(getpid());
  int ends_ = 0;
};

TEST_F(ProcessWatchTest, EndOfAProcessIsNoticed) {
  Child child;
  ASSERT_EQ(watch_.add(memberOf(child.pid()), self_, [this] { ++ends_; }), ProcessWatch::Outcome::kWatched);
  ASSERT_EQ(watched_.size(), 1u);
  EXPECT_FALSE(isReadable(0));
  child.letGo();
  ASSERT_TRUE(isReadable(30'000)) << "before it is reaped";
  watched_[0].second();
  EXPECT_EQ(ends_, 1);
}

TEST_F(ProcessWatchTest, ProcessThatIsForgottenCostsNoDescriptor) {
  const Child child;
  const Member member = memberOf(child.pid());
  ASSERT_EQ(watch_.add(member, self_, [] {}), ProcessWatch::Outcome::kWatched);
  watch_.forget(member);
  EXPECT_EQ(fcntl(watched_.at(0).first, F_GETFD), -1);
  watch_.forget(member); // twice does no harm
}

TEST_F(ProcessWatchTest, ProcessThatHasEndedIsNotWatched) {
  Child child;
  const Member member = memberOf(child.pid());
  child.letGo();
  child.reap();
  EXPECT_EQ(watch_.add(member, self_, [this] { ++ends_; }), ProcessWatch::Outcome::kHasEnded);
  EXPECT_TRUE(watched_.empty());
  EXPECT_EQ(ends_, 0);
}

TEST_F(ProcessWatchTest, AnotherProcessWithTheSameIdDoesNotCountAsTheMember) {
  const Child child;
  Member member = memberOf(child.pid());
  member.processStartTime -= 1;
  EXPECT_EQ(watch_.add(member, self_, [] {}), ProcessWatch::Outcome::kHasEnded);
}

TEST_F(ProcessWatchTest, LivingProcessIsNotTakenForEndedIfNoFileIsLeft) {
  Child child;
  const Member member = memberOf(child.pid());
  // One file can still be opened: it gets the lowest free number.
  const int next = dup(0);
  close(next);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit one{static_cast<rlim_t>(next) + 1, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &one), 0);
  const ProcessWatch::Outcome outcome = watch_.add(member, self_, [this] { ++ends_; });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_EQ(outcome, ProcessWatch::Outcome::kWatched);
  EXPECT_FALSE(isReadable(0));
  child.letGo();
  EXPECT_TRUE(isReadable(30'000));
}

TEST_F(ProcessWatchTest, ProcessesElsewhereCannotBeWatched) {
  Member otherMachine = self_;
  otherMachine.bootId = "another boot";
  EXPECT_EQ(watch_.add(otherMachine, self_, [] {}), ProcessWatch::Outcome::kNotPossible);
  Member otherNamespace = self_;
  otherNamespace.pidNamespace = 2;
  EXPECT_EQ(watch_.add(otherNamespace, self_, [] {}), ProcessWatch::Outcome::kNotPossible);
}

} // namespace
} // namespace torch_ucx_rpc
