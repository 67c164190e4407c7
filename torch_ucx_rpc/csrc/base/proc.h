#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

// Of a process or a thread, from its file `stat` under /proc; proc(5) lists the fields.
struct ProcStat {
  char state =
      '?'; // field 3: R runs, S sleeps and can be interrupted, D sleeps and cannot, T is stopped, Z and X have ended
  uint64_t cpuTicks = 0; // fields 14 and 15, in units of sysconf(_SC_CLK_TCK)
  uint64_t startTicks = 0; // field 22, since boot, in the same units
};

// Of "/proc/PID" or "/proc/PID/task/TID"; nothing if that is not there.
std::optional<ProcStat> readProcStat(const std::string& directory);

} // namespace torch_ucx_rpc
