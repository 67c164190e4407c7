#pragma once

#include "peers/barrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

// Several workers' barriers in one thread. Their frames, and the news of ends, wait until deliver() is called. As on a
// network, frames from one worker to another keep their order, and other frames may come in any order.
class Job {
 private:
  // One worker's view of the others, and its link to them.
  class Link final : public Barrier::Link {
   public:
    Link(Job& job, Rank rank) : job_(job), rank_(rank) {}
    bool isPresent(Rank rank) const override {
      return rank < job_.size_ && !gone_.contains(rank);
    }
    Rank endOfRanks() const override {
      return job_.size_;
    }
    Error lost() const override {
      std::string sentence;
      for (const auto& [rank, hasFailed] : gone_) {
        sentence += hasFailed ? "worker 'w" + std::to_string(rank) + "' has died; " : "";
      }
      return sentence.empty() ? Error() : Error(ErrorCode::kPeerFailed, sentence);
    }
    void sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) override {
      EXPECT_LT(to, rank_) << "a parent is below";
      job_.contact(rank_, to);
      ++job_.sent_[rank_];
      job_.post(
          rank_, to, [&job = job_, from = rank_, to, round, arrivals] { job.at(to).onArrive(from, round, arrivals); });
    }
    void sendRelease(Rank to, uint64_t round, const Barrier::Result& result) override {
      job_.contact(rank_, to);
      ++job_.sent_[rank_];
      job_.post(
          rank_, to, [&job = job_, from = rank_, to, round, result] { job.at(to).onRelease(from, round, result); });
    }

    std::map<Rank, bool> gone_; // true: it has failed; false: it has left

   private:
    Job& job_;
    const Rank rank_;
  };

 public:
  explicit Job(Rank size, unsigned seed = 1, int fanOut = Barrier::kFanOut) : size_(size), random_(seed) {
    for (Rank rank = 0; rank < size; ++rank) {
      nodes_.push_back(std::make_unique<Node>(*this, rank, fanOut));
    }
  }

  Barrier& at(Rank rank) {
    return nodes_[static_cast<size_t>(rank)]->barrier;
  }

  // `rank` says goodbye, or dies. All others notice, or only its contacts, each at its own time.
  void leave(Rank rank) {
    end(rank, false);
  }
  void die(Rank rank) {
    for (auto& [channel, frames] : channels_) {
      if (channel.first == rank) {
        frames.clear(); // frames that have not left are lost
      }
    }
    end(rank, true);
  }
  void onlyContactsNoticeEnds() {
    doOnlyContactsNotice_ = true;
  }

  // Only `rank` loses `other`.
  void lose(Rank rank, Rank other) {
    notice(rank, other, true);
  }

  // Runs the periodic check of a waiting worker.
  void tick(Rank rank) {
    at(rank).tick();
    for (const Rank other : at(rank).toContact()) {
      contact(rank, other);
    }
  }

  void deliverOne() {
    std::vector<Channel> ready;
    for (const auto& [channel, frames] : channels_) {
      if (!frames.empty()) {
        ready.push_back(channel);
      }
    }
    if (!ready.empty()) {
      deliverNextOf(ready[random_() % ready.size()]);
    }
  }
  void deliverAll() {
    while (undelivered() != 0) {
      deliverOne();
    }
  }
  void deliverAllTo(Rank rank) {
    for (bool isAnyLeft = true; isAnyLeft;) {
      isAnyLeft = false;
      for (auto& [channel, frames] : channels_) {
        if (channel.second == rank && !frames.empty()) {
          deliverNextOf(channel);
          isAnyLeft = true;
          break;
        }
      }
    }
  }
  void loseAllTo(Rank rank) {
    for (auto& [channel, frames] : channels_) {
      if (channel.second == rank) {
        frames.clear();
      }
    }
  }

  bool isReleased(Rank rank) {
    Barrier::Result result;
    return at(rank).wait(kPast, result);
  }
  Barrier::Result result(Rank rank) {
    Barrier::Result result;
    EXPECT_TRUE(at(rank).wait(kPast, result)) << "rank " << rank << " was not released";
    return result;
  }
  // Whether the result at `rank` names `dead` as dead.
  bool names(Rank rank, Rank dead) {
    return result(rank).lost.message().find("worker 'w" + std::to_string(dead) + "'") != std::string::npos;
  }
  // Return the numbers of frames that `rank` has sent, and of its contacts.
  int sent(Rank rank) {
    return sent_[rank];
  }
  size_t contacts(Rank rank) {
    return met_[rank].size();
  }
  std::mt19937& random() {
    return random_;
  }

 private:
  using Channel = std::pair<Rank, Rank>; // from, to
  struct Node {
    Node(Job& job, Rank rank, int fanOut) : link(job, rank), barrier(rank, link, fanOut) {}
    Link link;
    Barrier barrier;
  };

  void post(Rank from, Rank to, std::function<void()> frame) {
    channels_[{from, to}].push_back(std::move(frame));
  }
  void postEnd(Rank gone, Rank to) {
    post(gone, to, [this, gone, to] { notice(to, gone, gone_.at(gone)); });
  }
  void notice(Rank rank, Rank gone, bool hasFailed) {
    Node& node = *nodes_[static_cast<size_t>(rank)];
    if (node.link.gone_.emplace(gone, hasFailed).second) {
      node.barrier.onMembershipChange();
    }
  }
  void end(Rank rank, bool hasFailed) {
    gone_[rank] = hasFailed;
    for (Rank to = 0; to < size_; ++to) {
      if (to != rank && (!doOnlyContactsNotice_ || met_[rank].contains(to))) {
        postEnd(rank, to);
      }
    }
  }
  // A worker notices only the ends of its contacts.
  void contact(Rank one, Rank other) {
    met_[one].insert(other);
    met_[other].insert(one);
    if (gone_.contains(other)) {
      postEnd(other, one);
    }
  }
  size_t undelivered() const {
    size_t count = 0;
    for (const auto& [channel, frames] : channels_) {
      count += frames.size();
    }
    return count;
  }
  void deliverNextOf(const Channel& channel) {
    std::deque<std::function<void()>>& frames = channels_[channel];
    const std::function<void()> frame = std::move(frames.front());
    frames.pop_front();
    if (!gone_.contains(channel.second)) {
      frame();
    }
  }

  // Linux sleeps for 50 us, even if the limit is 0.
  static constexpr std::chrono::milliseconds kPast{-1};
  const Rank size_;
  std::map<Channel, std::deque<std::function<void()>>> channels_;
  std::map<Rank, bool> gone_; // true: it has failed; false: it has left
  std::map<Rank, std::set<Rank>> met_;
  std::map<Rank, int> sent_;
  bool doOnlyContactsNotice_ = false;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

} // namespace torch_ucx_rpc
