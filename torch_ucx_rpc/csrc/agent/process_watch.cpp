#include "agent/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>

namespace torch_ucx_rpc {

namespace {

// The start time of a process in clock ticks since boot, field 22 of /proc/PID/stat (proc(5)); 0 if there is no such process.
uint64_t startTimeOf(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t nameEnd = line.rfind(')'); // the name, field 2, may contain anything
  if (nameEnd == std::string::npos) {
    return 0;
  }
  std::istringstream fields(line.substr(nameEnd + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) {
    fields >> skipped;
  }
  uint64_t startTime = 0;
  fields >> startTime;
  return startTime;
}

} // namespace

ProcessWatch::~ProcessWatch() {
  for (const auto& [session, process] : processes_) {
    ::close(process);
  }
}

ProcessWatch::Outcome ProcessWatch::add(const Member& member, const Member& self, UniqueFunction<void()> onEnd) {
  if (member.bootId != self.bootId || member.pidNamespace != self.pidNamespace) {
    return Outcome::kNotPossible;
  }
  const int process = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(member.pid), 0));
  if (process < 0 && errno != ESRCH) {
    return Outcome::kNotPossible;
  }
  // Asked with the descriptor open: its process can have ended by now, but its id cannot mean another one.
  if (process < 0 || startTimeOf(member.pid) != member.processStartTime) {
    if (process >= 0) {
      ::close(process);
    }
    return Outcome::kHasEnded;
  }
  const std::lock_guard lock(mutex_);
  processes_[member.session] = process;
  watch_(process, std::move(onEnd));
  return Outcome::kWatched;
}

void ProcessWatch::forget(const Member& member) {
  const std::lock_guard lock(mutex_);
  const auto entry = processes_.find(member.session);
  if (entry != processes_.end()) {
    ::close(entry->second); // which takes it out of every epoll set
    processes_.erase(entry);
  }
}

} // namespace torch_ucx_rpc
