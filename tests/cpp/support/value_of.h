#pragma once

#include "rpc/reports.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ucx_rpc {

// Returns the value of a count by its name in torch_ucx_rpc.statistics().
inline uint64_t valueOf(const std::vector<Count>& counts, std::string_view name) {
  const auto found = std::ranges::find_if(counts, [&](const Count& count) { return count.name == name; });
  if (found == counts.end()) {
    throw std::invalid_argument("no count of the name " + std::string(name));
  }
  return found->value;
}

} // namespace torch_ucx_rpc
