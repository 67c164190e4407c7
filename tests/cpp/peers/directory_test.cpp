// The workers of the job by rank, by name and by session, and the ranks that a new worker may take.

#include "peers/directory.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace torch_ucx_rpc {
namespace {

Member member(Rank rank, const std::string& name, uint64_t session) {
  Member made;
  made.rank = rank;
  made.name = name;
  made.session = session;
  made.host = "host";
  made.pid = 7;
  return made;
}

class DirectoryTest : public testing::Test {
 protected:
  DirectoryTest() {
    for (const Rank rank : {2, 0, 1}) { // in any order
      directory_.add(member(rank, "w" + std::to_string(rank), 100 + static_cast<uint64_t>(rank)));
    }
  }

  static void end(Peer& peer, Peer::State state) {
    ASSERT_TRUE(peer.moveTo(state, {ErrorCode::kPeerFailed, "gone"}));
  }

  // Returns the error of add(), or "none".
  std::string refusal(const Member& added) {
    try {
      directory_.add(added);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  }

  static std::vector<Rank> ranksOf(const std::vector<Peer*>& peers) {
    std::vector<Rank> ranks;
    for (const Peer* peer : peers) {
      ranks.push_back(peer->member().rank);
    }
    return ranks;
  }

  using Ranks = std::vector<Rank>;
  Directory directory_;
};

TEST_F(DirectoryTest, WorkerIsFoundByRankNameAndSession) {
  Peer* const peer = directory_.find(Rank{1});
  ASSERT_NE(peer, nullptr);
  EXPECT_EQ(peer->member().name, "w1");
  EXPECT_EQ(directory_.find("w1"), peer);
  EXPECT_EQ(directory_.findSession(101), peer);
  EXPECT_EQ(&directory_.at(Rank{1}), peer);
  EXPECT_EQ(&directory_.at("w1"), peer);
}

TEST_F(DirectoryTest, UnknownWorkerIsNotFound) {
  EXPECT_EQ(directory_.find(Rank{3}), nullptr);
  EXPECT_EQ(directory_.find("w3"), nullptr);
  EXPECT_EQ(directory_.findSession(103), nullptr);
}

TEST_F(DirectoryTest, ErrorForAnUnknownRankListsTheWorkers) {
  try {
    (void)directory_.at(Rank{7});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const RpcFailure& failure) {
    EXPECT_EQ(failure.kind(), RpcFailure::Kind::kUnknownWorker);
    EXPECT_EQ(failure.details().rank, 7);
    EXPECT_TRUE(failure.details().name.empty());
    EXPECT_STREQ(
        failure.what(),
        "could not find destination worker with rank 7. The workers are: w0 (rank 0), w1 (rank 1), w2 (rank 2)");
  }
}

TEST_F(DirectoryTest, ErrorForAnUnknownNameListsTheWorkers) {
  try {
    (void)directory_.at("ps");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const RpcFailure& failure) {
    EXPECT_EQ(failure.kind(), RpcFailure::Kind::kUnknownWorker);
    EXPECT_EQ(failure.details().name, "ps");
    EXPECT_FALSE(failure.details().rank.has_value());
    EXPECT_STREQ(
        failure.what(),
        "could not find destination worker 'ps'. The workers are: w0 (rank 0), w1 (rank 1), w2 (rank 2)");
  }
}

TEST_F(DirectoryTest, RankOfAnotherWorkerIsNotTaken) {
  EXPECT_EQ(&directory_.at(Rank{1}, "w1"), directory_.find("w1"));
  EXPECT_THROW((void)directory_.at(Rank{1}, "w2"), RpcFailure);
  EXPECT_THROW((void)directory_.at(Rank{3}, "w3"), RpcFailure);
}

TEST_F(DirectoryTest, AllAreListedByRankWithTheirStates) {
  EXPECT_EQ(ranksOf(directory_.all()), (Ranks{0, 1, 2}));
  end(directory_.at(Rank{0}), Peer::State::kFailed);
  end(directory_.at(Rank{2}), Peer::State::kLeaving);
  EXPECT_EQ(ranksOf(directory_.all()), (Ranks{0, 1, 2}));
  EXPECT_EQ(ranksOf(directory_.present()), (Ranks{1})) << "a leaving worker takes no more part";
}

TEST_F(DirectoryTest, WorkerThatIsThereKeepsItsPlace) {
  EXPECT_NE(
      refusal(member(1, "other", 200)).find("worker 'other' (rank 1, pid 7 on host) has the same rank as worker 'w1'"),
      std::string::npos);
  EXPECT_NE(refusal(member(5, "w1", 200)).find("has the same name as worker 'w1'"), std::string::npos);
  EXPECT_NE(refusal(member(5, "other", 101)).find("has the same session as worker 'w1'"), std::string::npos);
  ASSERT_TRUE(directory_.at(Rank{1}).moveTo(Peer::State::kLeaving, {ErrorCode::kShutDown, "leaving"}));
  EXPECT_NE(refusal(member(1, "other", 200)), "none") << "a leaving worker is still there";
  EXPECT_EQ(ranksOf(directory_.all()), (Ranks{0, 1, 2})) << "a refused worker leaves no trace";
  EXPECT_EQ(directory_.find("other"), nullptr);
  EXPECT_EQ(directory_.findSession(200), nullptr);
}

TEST_F(DirectoryTest, PlaceOfAWorkerThatIsGoneCanBeTaken) {
  Peer& gone = directory_.at(Rank{1});
  end(gone, Peer::State::kFailed);
  directory_.add(member(1, "w1", 200));
  Peer* const taker = directory_.find(Rank{1});
  EXPECT_NE(taker, &gone);
  EXPECT_EQ(directory_.find("w1"), taker);
  EXPECT_EQ(directory_.findSession(200), taker);
  EXPECT_EQ(directory_.findSession(101), &gone) << "frames of it may still arrive";
  EXPECT_EQ(gone.member().name, "w1") << "errors can still name it";
}

TEST_F(DirectoryTest, LostWorkerCanBeTriedAgain) {
  Peer& lost = directory_.at(Rank{1});
  end(lost, Peer::State::kFailed);
  directory_.add(lost.member());
  EXPECT_NE(directory_.findSession(101), &lost);
  EXPECT_EQ(directory_.findSession(101), directory_.find(Rank{1}));
  EXPECT_EQ(directory_.at(Rank{1}).state(), Peer::State::kPresent);
}

TEST_F(DirectoryTest, OneWorkerCanTakeTheRankAndTheNameOfTwoGoneWorkers) {
  end(directory_.at(Rank{1}), Peer::State::kLeft);
  end(directory_.at(Rank{2}), Peer::State::kFailed);
  directory_.add(member(1, "w2", 200));
  EXPECT_EQ(ranksOf(directory_.all()), (Ranks{0, 1}));
  EXPECT_EQ(directory_.find("w2"), directory_.find(Rank{1}));
  EXPECT_EQ(directory_.find("w1"), nullptr);
  EXPECT_EQ(directory_.find(Rank{2}), nullptr);
}

TEST_F(DirectoryTest, RemovedWorkerIsKnownByItsSessionAlone) {
  Peer& removed = directory_.at(Rank{1});
  directory_.remove(removed);
  EXPECT_EQ(directory_.find(Rank{1}), nullptr);
  EXPECT_EQ(directory_.find("w1"), nullptr);
  EXPECT_EQ(directory_.findSession(101), &removed);
  EXPECT_EQ(ranksOf(directory_.all()), (Ranks{0, 2}));
}

TEST_F(DirectoryTest, RemovingAReplacedWorkerKeepsTheNewOne) {
  Peer& gone = directory_.at(Rank{1});
  end(gone, Peer::State::kFailed);
  directory_.add(member(1, "w1", 200));
  directory_.remove(gone);
  EXPECT_EQ(directory_.find(Rank{1}), directory_.findSession(200));
  EXPECT_NE(directory_.find("w1"), nullptr);
}

} // namespace
} // namespace torch_ucx_rpc
