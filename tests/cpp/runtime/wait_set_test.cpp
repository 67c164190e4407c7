// How a sleep ends, and which events it finds.

#include "runtime/wait_set.h"

#include "eventually.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

namespace torch_ucx_rpc {
namespace {

using Slept = WaitSet::Slept;

// A descriptor that becomes readable on demand.
class Signal {
 public:
  ~Signal() {
    ::close(fd);
  }
  void give() const {
    const uint64_t one = 1;
    ASSERT_EQ(write(fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }

  const int fd = eventfd(0, EFD_NONBLOCK);
};

size_t openFiles() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

TEST(WaitSetTest, ASleepReturnsTheReasonForItsEnd) {
  const Signal transport;
  const Signal other;
  WaitSet set(transport.fd);
  set.watch(other.fd, [] {});
  set.wake();
  EXPECT_EQ(set.sleep(), Slept::kUntilWoken);
  transport.give();
  EXPECT_EQ(set.sleep(), Slept::kUntilTransport);
  other.give();
  EXPECT_EQ(set.sleep(), Slept::kUntilReadable);
  EXPECT_EQ(set.sleep(), Slept::kForNothing) << "each event ends one sleep";
}

TEST(WaitSetTest, EachWakeUpIsAnEvent) {
  const Signal transport;
  WaitSet set(transport.fd);
  for (int round = 0; round < 3; ++round) { // the set never reads the counter of the descriptor
    set.wake();
    EXPECT_EQ(set.sleep(), Slept::kUntilWoken);
  }
}

TEST(WaitSetTest, AWakeUpEndsOneSleep) {
  const Signal transport;
  WaitSet set(transport.fd);
  std::atomic<int> woken{0};
  const auto sleeper = [&] {
    while (set.sleep() == Slept::kForNothing) {
    }
    woken.fetch_add(1);
  };
  std::thread one(sleeper);
  std::thread other(sleeper);
  set.wake();
  ASSERT_TRUE(eventually([&] { return woken.load() != 0; }));
  EXPECT_EQ(woken.load(), 1) << "the other sleeps on";
  set.wake();
  one.join();
  other.join();
  EXPECT_EQ(woken.load(), 2);
}

void runReadable(WaitSet& set) {
  for (WaitSet::Operation& operation : set.takeReadable()) {
    operation();
  }
}

TEST(WaitSetTest, AWatchedDescriptorIsFoundOnce) {
  const Signal transport;
  const Signal first;
  const Signal second;
  WaitSet set(transport.fd);
  std::string ran;
  set.watch(first.fd, [&] { ran += "first "; });
  set.watch(second.fd, [&] { ran += "second "; });
  EXPECT_TRUE(set.takeReadable().empty());
  second.give();
  runReadable(set);
  EXPECT_EQ(ran, "second ");
  second.give();
  EXPECT_TRUE(set.takeReadable().empty()) << "its operation has been taken";
  first.give();
  EXPECT_EQ(set.takeReadable().size(), 1u);
}

TEST(WaitSetTest, AFreedPlaceServesTheNextDescriptor) {
  const Signal transport;
  const Signal first;
  const Signal second;
  WaitSet set(transport.fd);
  std::string ran;
  set.watch(first.fd, [&] { ran += "first "; });
  first.give();
  EXPECT_EQ(set.takeReadable().size(), 1u);
  set.watch(second.fd, [&] { ran += "second "; });
  first.give();
  EXPECT_TRUE(set.takeReadable().empty()) << "the operation of the first has been taken";
  second.give();
  runReadable(set);
  EXPECT_EQ(ran, "second ");
}

TEST(WaitSetTest, MoreDescriptorsThanOneLookFindsAreAllFound) {
  const Signal transport;
  const Signal readable[40];
  WaitSet set(transport.fd);
  for (const Signal& signal : readable) {
    set.watch(signal.fd, [] {});
    signal.give();
  }
  EXPECT_EQ(set.takeReadable().size(), std::size(readable));
}

TEST(WaitSetTest, FullFileTableGivesAnErrorAndNothingStaysOpen) {
  const Signal transport;
  const size_t before = openFiles();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit tight = limit;
  const int next = dup(transport.fd); // the lowest free number
  ::close(next);
  tight.rlim_cur = static_cast<rlim_t>(next) + 2; // the set can open two files and needs three
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::string what;
  try {
    const WaitSet set(transport.fd);
  } catch (const std::runtime_error& error) {
    what = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_NE(what.find("ulimit -n"), std::string::npos) << what;
  EXPECT_EQ(openFiles(), before);
}

} // namespace
} // namespace torch_ucx_rpc
