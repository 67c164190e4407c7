#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace torch_ucx_rpc::wire {

// Which numbers of a sequence have come. Frames overtake each other, on several lanes by seconds and thousands, so what is
// kept is not a fixed stretch of the latest but what is missing below the highest: nothing as long as they come in order,
// and no frame is ever taken for a replay that is none.
class ReplayWindow {
 public:
  // A gap is a run of missing numbers. Beyond so many the oldest is given up: who leaves them has the secret, but shall
  // not cost more than this (about 64 bytes each).
  static constexpr size_t kMaxGaps = 4096;

  // False for a number that has come before.
  bool accept(uint64_t number);

  size_t gaps() const {
    return gaps_.size();
  }

 private:
  uint64_t next_ = 0; // one above the highest that has come
  std::map<uint64_t, uint64_t> gaps_; // first missing -> first after it that is not
};

} // namespace torch_ucx_rpc::wire
