#include "wire/replay_window.h"

#include <iterator>
#include <limits>

namespace torch_ucx_rpc::wire {

bool ReplayWindow::accept(uint64_t number) {
  if (number >= next_) {
    if (number == std::numeric_limits<uint64_t>::max()) {
      return false; // no sender counts that far, and the next number would be 0
    }
    if (number > next_) {
      gaps_.emplace(next_, number);
    }
    next_ = number + 1;
  } else {
    // Only the last gap that begins at the number or below can contain it.
    auto gap = gaps_.upper_bound(number);
    if (gap == gaps_.begin() || number >= (--gap)->second) {
      return false;
    }
    const uint64_t end = gap->second;
    gap->second = number; // the part of the gap before the number
    if (gap->first == number) {
      gaps_.erase(gap);
    }
    if (number + 1 < end) {
      gaps_.emplace(number + 1, end);
    }
  }
  if (gaps_.size() > kMaxGaps) {
    gaps_.erase(gaps_.begin());
  }
  return true;
}

bool ReplayWindow::hasCome(uint64_t number) const {
  if (number >= next_) {
    return number == std::numeric_limits<uint64_t>::max();
  }
  const auto gap = gaps_.upper_bound(number);
  return gap == gaps_.begin() || number >= std::prev(gap)->second;
}

} // namespace torch_ucx_rpc::wire
