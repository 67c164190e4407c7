// By which thread, and when, sent messages are destroyed.

#include "messaging/sent_messages.h"

#include "eventually.h"
#include "gate.h"
#include "test_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

class SentMessagesTest : public testing::Test {
 protected:
  // Calls a function when it is destroyed, like a tensor's deleter, which may be user code.
  class DestroyedLender final : public Lender {
   public:
    DestroyedLender(bool mayRunUserCode, std::function<void()> onDestroyed)
        : mayRunUserCode_(mayRunUserCode), onDestroyed_(std::move(onDestroyed)) {}
    ~DestroyedLender() override {
      onDestroyed_();
    }
    bool mayRunUserCode() const override {
      return mayRunUserCode_;
    }

   private:
    const bool mayRunUserCode_;
    const std::function<void()> onDestroyed_;
  };

  ~SentMessagesTest() override {
    gate_.open();
    EXPECT_EQ(executor_->stop(kPatience, [this] { leader_.end(); }), 0u);
  }

  void noteThread() {
    const std::lock_guard lock(mutex_);
    threads_.push_back(std::this_thread::get_id());
  }
  std::vector<std::thread::id> threads() {
    const std::lock_guard lock(mutex_);
    return threads_;
  }

  std::unique_ptr<OutgoingMessage> message(
      bool mayRunUserCode, bool isHeldUp = false, wire::Kind kind = wire::Kind::kRequest) {
    auto message = makeOutgoing(1, {}, std::make_unique<DestroyedLender>(mayRunUserCode, [this, isHeldUp] {
                                  if (isHeldUp) {
                                    gate_.pass();
                                  }
                                  noteThread();
                                }));
    message->header.kind = kind;
    return message;
  }
  void destroy(std::unique_ptr<OutgoingMessage> message) {
    sentMessages_.destroy(message);
    EXPECT_EQ(message, nullptr);
  }
  void destroyLater(std::unique_ptr<OutgoingMessage> message) {
    sentMessages_.destroyLater(message);
    EXPECT_EQ(message, nullptr);
  }

  std::mutex mutex_;
  std::vector<std::thread::id> threads_; // the threads that destroyed lenders, in order; guarded by mutex_
  Gate gate_;
  QuietLeader leader_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  Timer timer_;
  Lifetime lifetime_{[this] { return alive_; }};
  const std::shared_ptr<Executor> executor_ = std::make_shared<Executor>(4, 4, ThreadHooks{}, timer_);
  SentMessages sentMessages_{*executor_, lifetime_, timer_};
};

TEST_F(SentMessagesTest, MessageWithoutUserCodeIsLeftToTheCaller) {
  std::unique_ptr<OutgoingMessage> withoutLender = makeOutgoing(1);
  sentMessages_.destroy(withoutLender);
  EXPECT_NE(withoutLender, nullptr);
  std::unique_ptr<OutgoingMessage> harmless = message(false);
  sentMessages_.destroy(harmless);
  EXPECT_NE(harmless, nullptr);
  sentMessages_.destroyLater(harmless);
  EXPECT_NE(harmless, nullptr);
  EXPECT_TRUE(threads().empty());
}

TEST_F(SentMessagesTest, UserCodeRunsOnAnAgentThreadAndNotOnTheSendingOne) {
  destroy(message(true));
  EXPECT_TRUE(threads().empty()) << "no thread runs tasks yet";
  EXPECT_EQ(alive_.use_count(), 2) << "the waiting work holds the agent";
  executor_->start(leader_);
  ASSERT_TRUE(eventually([&] { return threads().size() == 1; }));
  EXPECT_NE(threads()[0], std::this_thread::get_id());
  EXPECT_TRUE(eventually([&] { return alive_.use_count() == 1; }));
}

TEST_F(SentMessagesTest, OneThreadDestroysAllMessagesThatComeWhileItWorks) {
  executor_->start(leader_);
  destroy(message(true, true));
  ASSERT_TRUE(eventually([&] { return gate_.waiting() == 1; }));
  for (int more = 0; more < 3; ++more) {
    destroy(message(true, true));
  }
  gate_.open();
  ASSERT_TRUE(eventually([&] { return threads().size() == 4; }));
  EXPECT_EQ(threads(), std::vector<std::thread::id>(4, threads()[0]));
  ASSERT_TRUE(eventually([&] { return alive_.use_count() == 1; }));
  destroy(message(true));
  EXPECT_TRUE(eventually([&] { return threads().size() == 5; })) << "what comes later is destroyed too";
}

TEST_F(SentMessagesTest, SendersMessageDiesOnTheThreadThatWaitsForTheAnswer) {
  executor_->start(leader_);
  destroyLater(message(true));
  EXPECT_TRUE(threads().empty()) << "the sending thread may hold locks of torch's";
  sentMessages_.destroyWaiting();
  EXPECT_EQ(threads(), std::vector<std::thread::id>{std::this_thread::get_id()});
  timer_.runDue(timer_.now() + SentMessages::kPatience);
  EXPECT_EQ(alive_.use_count(), 1) << "no agent thread is used for a destroyed message";
}

TEST_F(SentMessagesTest, UndestroyedSentMessageDiesOnAnAgentThreadInTime) {
  executor_->start(leader_);
  destroyLater(message(true));
  timer_.runDue(timer_.now() + SentMessages::kPatience);
  ASSERT_TRUE(eventually([&] { return threads().size() == 1; }));
  EXPECT_NE(threads()[0], std::this_thread::get_id());
}

TEST_F(SentMessagesTest, SendersMessagesDieOnAnAgentThreadIfTheyAreMany) {
  executor_->start(leader_);
  for (size_t sent = 0; sent < SentMessages::kMaxWaiting - 1; ++sent) {
    destroyLater(message(true));
  }
  EXPECT_EQ(alive_.use_count(), 1) << "they wait";
  destroyLater(message(true));
  ASSERT_TRUE(eventually([&] { return threads().size() == SentMessages::kMaxWaiting; }));
  EXPECT_EQ(threads(), std::vector<std::thread::id>(SentMessages::kMaxWaiting, threads()[0]));
  EXPECT_NE(threads()[0], std::this_thread::get_id());
}

TEST_F(SentMessagesTest, MessageOfATasksOwnCallDoesNotWaitForItsEnd) {
  executor_->start(leader_);
  std::atomic<size_t> destroyedWithin = 0;
  std::atomic<bool> taskIsOver = false;
  executor_->addCompletion([&] {
    destroyLater(message(true));
    sentMessages_.destroyWaiting(); // the thread does this while it waits for the answer
    destroyedWithin = threads().size();
    taskIsOver = true;
  });
  ASSERT_TRUE(eventually([&] { return taskIsOver.load(); }));
  EXPECT_EQ(destroyedWithin, 1u);
}

TEST_F(SentMessagesTest, AnswerDiesRightAfterItsTaskOnTheSameThread) {
  executor_->start(leader_);
  std::thread::id taskRanOn;
  bool wasDestroyedWithin = false;
  executor_->addCompletion([&] {
    taskRanOn = std::this_thread::get_id();
    destroy(message(true, false, wire::Kind::kResponse));
    wasDestroyedWithin = !threads().empty();
  });
  ASSERT_TRUE(eventually([&] { return threads().size() == 1; }));
  EXPECT_FALSE(wasDestroyedWithin);
  EXPECT_EQ(threads()[0], taskRanOn);
  EXPECT_EQ(alive_.use_count(), 1) << "the task that runs holds the agent, if anything does";
}

TEST_F(SentMessagesTest, WithoutAnAgentMessageIsDestroyedAtOnce) {
  alive_.reset();
  destroy(message(true));
  EXPECT_EQ(threads(), std::vector<std::thread::id>{std::this_thread::get_id()}) << "no thread is left for it";
}

} // namespace
} // namespace torch_ucx_rpc
