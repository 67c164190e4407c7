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

// Reads "/proc/PID/stat" or "/proc/PID/task/TID/stat", given the folder. Nothing if it is not there.
std::optional<ProcStat> readProcStat(const std::string& directory);

// The text of a file under /proc. Nothing if it cannot be read; errno says why.
std::optional<std::string> readProcFile(const std::string& path);

// Whether a thread is known to be in a system call that waits, so that it is not in the middle of writing to memory of
// its own accord. Elsewhere the kernel may have taken it out of its own code: a page fault, a frozen cgroup, a stop.
// Takes the folder "/proc/PID/task/TID". Calls of device drivers (ioctl) do not count, because a copy from a device is
// made of them.
bool isInSystemCall(const std::string& directory);

} // namespace torch_ucx_rpc
