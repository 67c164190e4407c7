#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace torch_ucx_rpc::wire {

// Knows which numbers of a sequence have come. Frames overtake each other, on several lanes by seconds and by
// thousands. So it keeps the gaps below the highest number, not a fixed stretch of the latest. It costs nothing while
// numbers come in order, and no frame is wrongly taken for a replay. Not thread-safe.
class ReplayWindow {
 public:
  // A gap is a run of missing numbers. Beyond this many the oldest gap is given up, and its numbers count as replays. A
  // peer that leaves so many has the secret, but must not cost more memory than this (about 64 bytes a gap).
  static constexpr size_t kMaxGaps = 4096;

  // Takes a number. False if it has come before, or may have.
  bool accept(uint64_t number);

  size_t gaps() const {
    return gaps_.size();
  }

 private:
  uint64_t next_ = 0; // one above the highest that has come
  std::map<uint64_t, uint64_t> gaps_; // first missing -> first after it that is not
};

} // namespace torch_ucx_rpc::wire
