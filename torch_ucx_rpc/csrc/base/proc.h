#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

// The facts in the file `stat` of a process or a thread under /proc; proc(5) lists the fields.
struct ProcStat {
  // Field 3: R runs, S sleeps and can be interrupted, D sleeps and cannot, T is stopped, Z and X have ended.
  char state = '?';
  uint64_t cpuTicks = 0; // fields 14 and 15, in units of sysconf(_SC_CLK_TCK)
  uint64_t startTicks = 0; // field 22, since boot, in the same units
};

// Reads the file `stat` of `directory`, which is "/proc/PID" or "/proc/PID/task/TID". Returns nothing if the file
// cannot be read.
std::optional<ProcStat> readProcStat(const std::string& directory);

// Reads the text of a file under /proc. Returns nothing if it cannot be read; errno says why.
std::optional<std::string> readProcFile(const std::string& path);

// Returns true if a thread is known to wait in a system call. Its own code is then not in the middle of a write to
// memory. A page fault, a frozen cgroup or a stop can interrupt a thread anywhere, also in the middle of a write.
// `directory` is "/proc/PID/task/TID". Calls of device drivers (ioctl) do not count, because they carry out copies from
// devices.
bool isInSystemCall(const std::string& directory);

} // namespace torch_ucx_rpc
