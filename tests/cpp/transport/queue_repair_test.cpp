// Shared-memory queues with an unmarked slot. A sender that is killed while it writes leaves one.

#include "transport/ucp/queue_repair.h"

#include "base/proc.h"
#include "eventually.h"
#include "outcome.h"
#include "transport/ucp/shared_memory_queue.h"
#include "ucp_lanes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace torch_ucx_rpc {
namespace {

class Counter final : public TransportListener {
 public:
  void onEager(std::span<const std::byte> /*header*/, std::span<const std::byte> /*bytes*/) override {
    ++arrived;
  }
  void onRendezvous(std::span<const std::byte> /*header*/, void* /*rendezvous*/, uint64_t /*bytes*/) override {}
  void onEndpointFailed(EndpointId /*endpoint*/, const Error& /*error*/) override {}

  int arrived = 0;
};

// A process with this process's mappings, which the test can stop and let go on.
class Bystander {
 public:
  explicit Bystander(const std::function<void()>& does) : pid_(fork()) {
    if (pid_ == 0) {
      does();
      _exit(0);
    }
  }
  ~Bystander() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  // Stops it while it is busy in its own code, perhaps in the middle of a write, and not in a system call.
  void stop() const {
    const std::string thread = "/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_);
    do {
      int status = 0;
      kill(pid_, SIGCONT);
      kill(pid_, SIGSTOP);
      ASSERT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
      ASSERT_TRUE(WIFSTOPPED(status));
    } while (isInSystemCall(thread));
  }
  void goOn() const {
    kill(pid_, SIGCONT);
  }

 private:
  const pid_t pid_;
};

// While an object of this class exists, this process cannot open a file.
class NoFiles {
 public:
  NoFiles() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &files_), 0);
    const rlimit none{0, files_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoFiles() {
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &files_), 0);
  }
  NoFiles(const NoFiles&) = delete;
  NoFiles& operator=(const NoFiles&) = delete;

 private:
  rlimit files_{};
};

class QueueRepairTest : public testing::TestWithParam<const char*> {
 protected:
  QueueRepairTest() {
    connect(",self");
  }

  void connect(const char* furtherLanes) {
    const std::string lanes = GetParam() + std::string(furtherLanes);
    sender_ = makeUcpTransportOver(lanes);
    const std::set<uintptr_t> others = SharedMemoryQueue::mapped();
    receiver_ = makeUcpTransportOver(lanes);
    mapped_.clear();
    for (const uintptr_t begin : SharedMemoryQueue::mapped()) {
      if (!others.contains(begin)) {
        mapped_.push_back(begin);
      }
    }
    queues_ = SharedMemoryQueue::mappedSince(others);

    receiver_->setListener(&received_);
    sender_->setListener(&sent_);
    EXPECT_FALSE(sender_->connect(receiver_->address(), endpoint_));
  }

  void SetUp() override {
    if (std::string(GetParam()) == "posix" && queues_.size() == 1 && !queues_[0].processes()) {
      GTEST_SKIP() << "POSIX memory is repaired only if all processes are visible, unlike in containers";
    }
  }

  void send() {
    Outcome sent;
    const wire::Header header{};
    sender_->send(endpoint_, header, {}, SendMode::kEager, sent.callback());
    EXPECT_TRUE(eventually([&] { return progress(), sent.isDone(); }));
  }
  void progress() {
    sender_->progress();
    receiver_->progress();
  }
  bool arrives(int messages) {
    return eventually([&] { return progress(), received_.arrived == messages; });
  }
  // Repairs like an agent, until no slot blocks the queue.
  bool repair() {
    receiver_->scanForRepair();
    return receiver_->repairState() == RepairState::kWhole;
  }
  // Takes a slot like a sender. The queue's memory begins with the head. The receiver's pid comes after the second
  // cache line.
  void takeSlot() {
    for (const uintptr_t begin : mapped_) {
      if (*reinterpret_cast<const pid_t*>(begin + 136) == getpid()) { // NOLINT(performance-no-int-to-ptr)
        std::atomic_ref(*reinterpret_cast<uint64_t*>(begin)).fetch_add(1); // NOLINT(performance-no-int-to-ptr)
        ASSERT_NE(queues_.at(0).unwritten(), std::nullopt);
        return;
      }
    }
    FAIL() << "the queue is not mapped";
  }
  // Leaves a slot without a message, and a message behind it.
  void abandonSlot() {
    send();
    ASSERT_TRUE(arrives(1));
    takeSlot();
    send();
  }
  void expectRepair() {
    EXPECT_TRUE(eventually([&] { return progress(), repair(); }));
    EXPECT_TRUE(arrives(2));
  }
  bool isStuckWith(int messages) {
    for (int turn = 0; turn < 1000; ++turn) {
      progress();
    }
    return received_.arrived == messages;
  }

  std::unique_ptr<Transport> sender_;
  std::unique_ptr<Transport> receiver_;
  std::vector<uintptr_t> mapped_;
  std::vector<SharedMemoryQueue> queues_;
  Counter received_;
  Counter sent_;
  EndpointId endpoint_ = 0;
};

TEST_P(QueueRepairTest, QueueIsRecognized) {
  ASSERT_EQ(queues_.size(), 1u);
  EXPECT_EQ(queues_[0].end(), 0u);
  send();
  EXPECT_TRUE(arrives(1));
  EXPECT_GT(queues_[0].end(), 0u);
  EXPECT_EQ(queues_[0].unwritten(), std::nullopt);
}

TEST_P(QueueRepairTest, QueueThatWasUsedIsNotTakenForNew) {
  send();
  EXPECT_TRUE(arrives(1));
  EXPECT_EQ(SharedMemoryQueue::mappedSince({}).size(), 1u); // the sender's own queue
}

TEST_P(QueueRepairTest, QueueWithoutAnUnwrittenSlotNeedsNoRepair) {
  send();
  EXPECT_TRUE(arrives(1));
  EXPECT_TRUE(repair());
}

TEST_P(QueueRepairTest, MessageInASkippedSlotIsDroppedSilently) {
  send();
  ASSERT_TRUE(arrives(1));
  takeSlot();
  testing::internal::CaptureStdout(); // where UCX logs
  queues_[0].skip(*queues_[0].unwritten());
  send();
  EXPECT_TRUE(arrives(2));
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_P(QueueRepairTest, AbandonedSlotIsSkippedAndTheOthersArrive) {
  for (int round = 0; round < 600; ++round) { // twice around the ring, so both marks occur
    send();
  }
  ASSERT_TRUE(arrives(600));
  takeSlot();
  takeSlot();
  send();
  EXPECT_TRUE(isStuckWith(600));
  EXPECT_TRUE(eventually([&] { return progress(), repair(); }));
  EXPECT_TRUE(arrives(601));
  send();
  EXPECT_TRUE(arrives(602));
}

TEST_P(QueueRepairTest, PossibleWriterIsAwaited) {
  abandonSlot();
  const Bystander bystander([] {
    for (;;) { // busy with something else
    }
  });
  bystander.stop();
  for (int turn = 0; turn < 50; ++turn) {
    EXPECT_FALSE(repair());
    usleep(1000);
  }
  EXPECT_TRUE(isStuckWith(1));
  {
    const NoFiles none; // nothing is known about the writer
    EXPECT_FALSE(repair());
    EXPECT_FALSE(repair());
    EXPECT_TRUE(isStuckWith(1));
  }
  bystander.goOn();
  expectRepair();
}

TEST_P(QueueRepairTest, NothingIsSkippedWhereProcessesMayNotBeSeen) {
  abandonSlot();
  {
    const NoFiles none;
    for (int turn = 0; turn < 50; ++turn) {
      EXPECT_FALSE(repair());
    }
    EXPECT_TRUE(isStuckWith(1));
  }
  expectRepair();
}

TEST_P(QueueRepairTest, SleepingThreadIsNotWriting) {
  send();
  ASSERT_TRUE(arrives(1));
  takeSlot();
  const Bystander bystander([] {
    for (;;) {
      pause();
    }
  });
  send();
  expectRepair();
}

// Without files this process cannot see the senders, as in NothingIsSkippedWhereProcessesMayNotBeSeen.
TEST_P(QueueRepairTest, UnseenProcessesMakeTheQueueUnrepairableAfterSomeScans) {
  abandonSlot();
  {
    const NoFiles none;
    for (int scans = 0; receiver_->repairState() == RepairState::kUndecided && scans < 1000; ++scans) {
      receiver_->scanForRepair();
    }
    EXPECT_EQ(receiver_->repairState(), RepairState::kUnrepairable);
  }
  EXPECT_TRUE(isStuckWith(1));
  expectRepair(); // the queue is still checked now and then
}

TEST_P(QueueRepairTest, StoppedSenderMakesTheQueueUnrepairableUntilItContinues) {
  abandonSlot();
  const Bystander bystander([] {
    for (;;) {
    }
  });
  bystander.stop();
  while (receiver_->repairState() == RepairState::kUndecided) {
    receiver_->scanForRepair();
  }
  EXPECT_EQ(receiver_->repairState(), RepairState::kUnrepairable);
  EXPECT_TRUE(isStuckWith(1));
  bystander.goOn();
  expectRepair();
}

TEST_P(QueueRepairTest, NetworkReachesADeafWorkerAndARepairDeliversTheRest) {
  connect(",tcp,self");
  EndpointId back = 0;
  ASSERT_FALSE(receiver_->connect(sender_->address(), back));
  abandonSlot();
  EXPECT_TRUE(isStuckWith(1));
  const EndpointId stuck = endpoint_;
  ASSERT_FALSE(receiver_->connectOverNetwork(sender_->address(), back));
  ASSERT_FALSE(sender_->connectOverNetwork(receiver_->address(), endpoint_));
  send();
  EXPECT_TRUE(arrives(2));
  Outcome answered;
  receiver_->send(back, wire::Header{}, {}, SendMode::kEager, answered.callback());
  EXPECT_TRUE(eventually([&] { return progress(), sent_.arrived == 1; }));
  EXPECT_TRUE(eventually([&] { return progress(), repair(); }));
  EXPECT_TRUE(arrives(3));
  endpoint_ = stuck;
  send();
  EXPECT_TRUE(arrives(4));
}

// A scan on another thread touches no data of UCX. Gaps are closed later, under the worker lock.
TEST_P(QueueRepairTest, AScanRunsBesideTheTransport) {
  send();
  ASSERT_TRUE(arrives(1));
  takeSlot();
  std::atomic<bool> isOver{false};
  std::thread scanner([&] {
    while (!isOver.load()) {
      receiver_->scanForRepair();
    }
  });
  send();
  EXPECT_TRUE(eventually([&] { return progress(), receiver_->repairState() == RepairState::kWhole; }));
  EXPECT_TRUE(arrives(2));
  receiver_->close(0);
  isOver.store(true);
  scanner.join();
}

TEST_P(QueueRepairTest, AQueueStaysConsistentWithAnyMessages) {
  for (int round = 0; round < 300; ++round) { // more than once around the ring
    send();
    ASSERT_TRUE(queues_.at(0).isConsistent()) << round;
  }
  ASSERT_TRUE(arrives(300));
  takeSlot();
  EXPECT_TRUE(queues_.at(0).isConsistent());
}

INSTANTIATE_TEST_SUITE_P(Lanes, QueueRepairTest, testing::Values("posix", "sysv"), [](const auto& lanes) {
  return std::string(lanes.param);
});

TEST(QueueRepairVersionTest, OnlyTestedVersionsAreRepaired) {
  for (const char* tested : {"1.14.1", "1.18.0", "1.22.0", "1.22"}) {
    EXPECT_EQ(whyQueuesAreNotRepaired(tested), "") << tested;
  }
  for (const char* other : {"1.13.1", "1.23.0", "2.0.0", ""}) {
    EXPECT_NE(whyQueuesAreNotRepaired(other), "") << other;
  }
}

TEST(QueueRepairVersionTest, TheDescriptionTellsWhy) {
  EXPECT_EQ(QueueRepair({}, "").description(), "on");
  QueueRepair off({}, "UCX 1.23 was not tested");
  EXPECT_EQ(off.description(), "off: UCX 1.23 was not tested");
  EXPECT_EQ(off.state(), RepairState::kWhole);
  bool isDescribed = false;
  for (const auto& [key, value] : makeUcpTransport(1)->description()) {
    isDescribed |= key == "ucx.shared_memory_repair" && value == "on";
  }
  EXPECT_TRUE(isDescribed);
}

} // namespace
} // namespace torch_ucx_rpc
