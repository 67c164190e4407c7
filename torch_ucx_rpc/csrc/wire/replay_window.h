#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace torch_ucx_rpc::wire {

// Knows which numbers of a sequence have come. On several lanes, frames overtake each other by thousands of frames and
// by seconds. So the window keeps the gaps below the highest number, not a fixed number of the latest ones. It costs
// nothing while numbers come in order. Up to kMaxGaps gaps, it never takes a new number for a replay. Not thread-safe.
class ReplayWindow {
 public:
  // A gap is a run of missing numbers. If there are more gaps than this, the window forgets the oldest gap, whose
  // numbers then count as replays. Even a peer that knows the secret must not cost more memory than this (about 64
  // bytes a gap).
  static constexpr size_t kMaxGaps = 4096;

  // The sequence begins at `first`.
  explicit ReplayWindow(uint64_t first = 0) : next_(first) {}
  ReplayWindow(uint64_t next, std::map<uint64_t, uint64_t> missing) : next_(next), gaps_(std::move(missing)) {}

  // Takes a number. Returns false if it has come before, or may have.
  bool accept(uint64_t number);
  // Whether accept() would return false.
  bool hasCome(uint64_t number) const;

  // The lowest number that has not come.
  uint64_t firstMissing() const {
    return gaps_.empty() ? next_ : gaps_.begin()->first;
  }
  // One above the highest number that has come.
  uint64_t next() const {
    return next_;
  }
  // The runs of missing numbers below next(): the first number of each -> the first number after it.
  const std::map<uint64_t, uint64_t>& missing() const {
    return gaps_;
  }

  size_t gaps() const {
    return gaps_.size();
  }

 private:
  uint64_t next_;
  std::map<uint64_t, uint64_t> gaps_;
};

} // namespace torch_ucx_rpc::wire
