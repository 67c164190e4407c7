#include "messaging/receive_window.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

constexpr bool kRequest = false;
constexpr bool kResponse = true;

class ReceiveWindowTest : public testing::Test {
 protected:
  explicit ReceiveWindowTest(uint64_t limitBytes = 1000)
      : window_(std::make_shared<ReceiveWindow>(limitBytes, [this] { ++room_; })) {}

  int room_ = 0;
  const std::shared_ptr<ReceiveWindow> window_;
};

TEST_F(ReceiveWindowTest, AdmitsUpToItsLimit) {
  Admission first;
  Admission second;
  Admission third;
  EXPECT_TRUE(window_->tryAdmit(kRequest, 600, first));
  EXPECT_TRUE(window_->tryAdmit(kRequest, 400, second));
  EXPECT_FALSE(window_->tryAdmit(kRequest, 1, third));
  EXPECT_EQ(window_->inUseBytes(), 1000u);
  first.release();
  EXPECT_EQ(window_->inUseBytes(), 400u);
  EXPECT_TRUE(window_->tryAdmit(kRequest, 600, third));
}

TEST_F(ReceiveWindowTest, ResponsesHaveABudgetOfTheirOwn) {
  Admission request;
  Admission response;
  EXPECT_TRUE(window_->tryAdmit(kRequest, 1000, request));
  EXPECT_TRUE(window_->tryAdmit(kResponse, 1000, response));
  Admission none;
  EXPECT_FALSE(window_->tryAdmit(kResponse, 1, none));
  request.release();
  EXPECT_FALSE(window_->tryAdmit(kResponse, 1, none)) << "a request's room is not a response's";
}

TEST_F(ReceiveWindowTest, MessageLargerThanTheWindowIsAdmittedAlone) {
  Admission small;
  Admission large;
  EXPECT_TRUE(window_->tryAdmit(kRequest, 1, small));
  EXPECT_FALSE(window_->tryAdmit(kRequest, 5000, large));
  small.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, 5000, large));
  EXPECT_EQ(window_->inUseBytes(), 5000u);
  EXPECT_FALSE(window_->tryAdmit(kRequest, 1, small));
  large.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, 1, small));
}

TEST_F(ReceiveWindowTest, SizesNearTheLargestNumberDoNotWrap) {
  Admission first;
  Admission second;
  EXPECT_TRUE(window_->tryAdmit(kRequest, 500, first));
  EXPECT_FALSE(window_->tryAdmit(kRequest, ~uint64_t{0} - 400, second));
}

TEST_F(ReceiveWindowTest, MemoryOfDevicesHasABoundOfItsOwn) {
  constexpr uint64_t kDevices = ReceiveWindow::kDeviceLimitBytes;
  Admission host;
  Admission device;
  Admission more;
  EXPECT_TRUE(window_->tryAdmit(kRequest, 5000, host)) << "alone";
  EXPECT_TRUE(window_->tryAdmit(kRequest, 0, device, kDevices));
  EXPECT_EQ(window_->inUseBytes(), 5000u);
  EXPECT_EQ(window_->deviceBytesInUse(), kDevices);
  EXPECT_FALSE(window_->tryAdmit(kRequest, 0, more, 1));
  EXPECT_TRUE(window_->tryAdmit(kResponse, 0, more, 1)) << "answers have a budget of their own here too";
  more.release();
  host.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, 1000, host));
  device.release();
  EXPECT_EQ(window_->deviceBytesInUse(), 0u);
  EXPECT_FALSE(window_->tryAdmit(kRequest, 1, more, 1)) << "both must fit";
  host.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, 1000, more, 2 * kDevices)) << "alone";
}

TEST_F(ReceiveWindowTest, AdmitIgnoresTheLimit) {
  Admission first;
  Admission second;
  window_->admit(kRequest, 900, first);
  window_->admit(kRequest, 900, second);
  EXPECT_EQ(window_->inUseBytes(), 1800u);
}

TEST_F(ReceiveWindowTest, AdmissionGivesBackExactlyOnce) {
  {
    Admission first;
    ASSERT_TRUE(window_->tryAdmit(kRequest, 700, first));
    Admission moved = std::move(first);
    first.release(); // NOLINT(bugprone-use-after-move): holds nothing any more
    EXPECT_EQ(window_->inUseBytes(), 700u);
    moved.release();
    moved.release();
    EXPECT_EQ(window_->inUseBytes(), 0u);
    ASSERT_TRUE(window_->tryAdmit(kRequest, 300, moved));
  }
  EXPECT_EQ(window_->inUseBytes(), 0u) << "destruction gives back";
}

TEST_F(ReceiveWindowTest, StallsWhileMessagesWaitAndNothingIsGivenBack) {
  const auto kNext = std::chrono::milliseconds(1);
  ReceiveWindow::TimePoint now{std::chrono::hours(1)};
  EXPECT_FALSE(window_->hasStalled(now, false)) << "no message waits";
  window_->waitingMessages.store(1);
  Admission held;
  ASSERT_TRUE(window_->tryAdmit(kRequest, 100, held));
  EXPECT_FALSE(window_->hasStalled(now, false)) << "the first look";
  EXPECT_FALSE(window_->hasStalled(now += ReceiveWindow::kPatience - kNext, false));
  EXPECT_TRUE(window_->hasStalled(now += kNext, false));
  EXPECT_FALSE(window_->hasStalled(now += kNext, false)) << "once in a while";
  held.release();
  held.release();
  EXPECT_FALSE(window_->hasStalled(now += ReceiveWindow::kPatience, false)) << "bytes were given back";
  EXPECT_FALSE(window_->hasStalled(now += ReceiveWindow::kPatience, true)) << "bytes will be given back";
  EXPECT_TRUE(window_->hasStalled(now += ReceiveWindow::kPatience, false));
  window_->receivingMessages.store(1);
  EXPECT_FALSE(window_->hasStalled(now += ReceiveWindow::kPatience, false)) << "a slow network is no deadlock";
  EXPECT_TRUE(window_->hasStalled(now += ReceiveWindow::kPatienceWhileReceiving, false));
}

TEST_F(ReceiveWindowTest, AssignmentReleasesTheOldMemory) {
  Admission first;
  Admission second;
  ASSERT_TRUE(window_->tryAdmit(kRequest, 100, first));
  ASSERT_TRUE(window_->tryAdmit(kResponse, 200, second));
  first = std::move(second);
  EXPECT_EQ(window_->inUseBytes(), 200u);
}

TEST_F(ReceiveWindowTest, TellsOfRoomOnlyWhenSomethingWaits) {
  Admission admission;
  ASSERT_TRUE(window_->tryAdmit(kRequest, 100, admission));
  admission.release();
  EXPECT_EQ(room_, 0);
  window_->waitingMessages.store(1);
  ASSERT_TRUE(window_->tryAdmit(kRequest, 100, admission));
  admission.release();
  EXPECT_EQ(room_, 1);
}

constexpr uint64_t kMaxQueued = ReceiveWindow::kMaxQueuedBytes;
constexpr uint64_t kMaxShare = ReceiveWindow::kMaxQueuedShare;

class WideReceiveWindowTest : public ReceiveWindowTest {
 protected:
  WideReceiveWindowTest() : ReceiveWindowTest(10 * kMaxQueued) {}
};

TEST_F(WideReceiveWindowTest, QueuedRequestsAreBounded) {
  Admission first;
  Admission second;
  ASSERT_TRUE(window_->tryAdmit(kRequest, kMaxShare, first));
  EXPECT_FALSE(window_->tryAdmit(kRequest, kMaxQueued - kMaxShare + 1, second));
  EXPECT_TRUE(window_->tryAdmit(kResponse, 3 * kMaxQueued - kMaxShare, second)) << "the caller waits for the answer";
  first.beginHandling();
  EXPECT_EQ(window_->inUseBytes(), 3 * kMaxQueued);
  Admission third;
  EXPECT_TRUE(window_->tryAdmit(kRequest, kMaxQueued, third));
}

TEST_F(WideReceiveWindowTest, OneRequestLargerThanTheBoundIsQueuedAtATime) {
  Admission one;
  Admission other;
  ASSERT_TRUE(window_->tryAdmit(kRequest, 2 * kMaxQueued, one));
  EXPECT_FALSE(window_->tryAdmit(kRequest, 2 * kMaxQueued, other));
  one.beginHandling();
  EXPECT_TRUE(window_->tryAdmit(kRequest, 2 * kMaxQueued, other));
}

TEST_F(WideReceiveWindowTest, SmallRequestsFindRoomBesideALargeOne) {
  Admission large;
  Admission small;
  Admission next;
  ASSERT_TRUE(window_->tryAdmit(kRequest, 4 * kMaxQueued, large));
  EXPECT_TRUE(window_->tryAdmit(kRequest, kMaxQueued - kMaxShare, small));
  EXPECT_FALSE(window_->tryAdmit(kRequest, 1, next));
  large.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, kMaxShare, next));
}

TEST_F(WideReceiveWindowTest, ReleasedRequestIsNotQueuedAnyMore) {
  Admission unhandled;
  Admission handled;
  Admission next;
  ASSERT_TRUE(window_->tryAdmit(kRequest, kMaxQueued / 2, unhandled));
  ASSERT_TRUE(window_->tryAdmit(kRequest, kMaxQueued / 2, handled));
  handled.beginHandling();
  handled.beginHandling(); // only the first call counts
  handled.release();
  EXPECT_FALSE(window_->tryAdmit(kRequest, kMaxQueued, next));
  unhandled.release();
  EXPECT_TRUE(window_->tryAdmit(kRequest, kMaxQueued, next));
}

TEST_F(WideReceiveWindowTest, TellsOfRoomWhenHandlingBegins) {
  Admission admission;
  ASSERT_TRUE(window_->tryAdmit(kRequest, kMaxQueued, admission));
  window_->waitingMessages.store(1);
  admission.beginHandling();
  EXPECT_EQ(room_, 1);
  admission.release();
  EXPECT_EQ(room_, 2);
}

TEST_F(ReceiveWindowTest, AdmissionKeepsTheWindowAlive) {
  Admission admission;
  {
    const auto window = std::make_shared<ReceiveWindow>(10, [] {});
    ASSERT_TRUE(window->tryAdmit(kRequest, 10, admission));
  }
  admission.release();
}

TEST(ReceiveWindowThreadsTest, SumIsRightInAnyOrder) {
  const auto window = std::make_shared<ReceiveWindow>(1000, [] {});
  std::mutex workerLock; // admissions hold it, releases do not
  std::atomic<bool> isExceeded{false};
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 6; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      for (int step = 0; step < 20'000; ++step) {
        Admission admission;
        {
          const std::lock_guard lock(workerLock);
          if (window->tryAdmit(random() % 2 == 0, 1 + random() % 500, admission) && window->inUseBytes() > 2000) {
            isExceeded.store(true);
          }
        }
        if (random() % 2 == 0) {
          admission.beginHandling();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_FALSE(isExceeded.load());
  EXPECT_EQ(window->inUseBytes(), 0u);
}

} // namespace
} // namespace torch_ucx_rpc
