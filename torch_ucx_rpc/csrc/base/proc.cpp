#include "base/proc.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <string_view>

namespace torch_ucx_rpc {

namespace {

// Parts of the names of kernel functions in which a system call waits, in Linux 4.18 to 6.18.
constexpr std::array<std::string_view, 15> kWaits = {
    "futex",
    "poll",
    "nanosleep",
    "select",
    "pipe_",
    "skb_wait",
    "sk_wait",
    "wait_woken",
    "unix_stream",
    "accept",
    "do_wait",
    "pause",
    "sigtimedwait",
    "sigsuspend",
    "cqring_wait"};

} // namespace

std::optional<std::string> readProcFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return std::nullopt;
  }
  std::string text;
  std::array<char, 16 * 1024> part{};
  ssize_t bytes = 0;
  while ((bytes = read(fd, part.data(), part.size())) > 0) {
    text.append(part.data(), static_cast<size_t>(bytes));
  }
  const int why = errno; // close() may change it
  close(fd);
  errno = why;
  return bytes == 0 ? std::optional(std::move(text)) : std::nullopt;
}

std::optional<ProcStat> readProcStat(const std::string& directory) {
  const std::string line = readProcFile(directory + "/stat").value_or("");
  const size_t nameEnd = line.rfind(')'); // the name, field 2, may contain anything
  if (nameEnd == std::string::npos) {
    return std::nullopt;
  }
  std::istringstream fields(line.substr(nameEnd + 1));
  const auto skip = [&fields](int count) {
    for (std::string skipped; count > 0; --count) {
      fields >> skipped;
    }
  };
  ProcStat stat;
  uint64_t userTicks = 0;
  uint64_t systemTicks = 0;
  fields >> stat.state; // field 3
  skip(10);
  fields >> userTicks >> systemTicks; // fields 14 and 15
  skip(6);
  fields >> stat.startTicks; // field 22
  stat.cpuTicks = userTicks + systemTicks;
  return stat;
}

bool isInSystemCall(const std::string& directory) {
  // "NUMBER ARGUMENTS... SP PC" in a system call, "-1 SP PC" asleep elsewhere, or "running".
  if (const std::optional<std::string> call = readProcFile(directory + "/syscall")) {
    char* end = nullptr;
    const long number = std::strtol(call->c_str(), &end, 10);
    return end != call->c_str() && number >= 0 && number != SYS_ioctl;
  }
  // Reading `syscall` requires the right to trace the thread. Yama denies that right to siblings on many systems.
  // Reading `wchan`, the kernel function in which the thread waits, requires only the right to read. A hidden `wchan`
  // is "0".
  const std::string function = readProcFile(directory + "/wchan").value_or("");
  const std::optional<ProcStat> stat = readProcStat(directory);
  return stat && stat->state == 'S' &&
      std::ranges::any_of(kWaits, [&](std::string_view name) { return function.find(name) != std::string::npos; });
}

} // namespace torch_ucx_rpc
