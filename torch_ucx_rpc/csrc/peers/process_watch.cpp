#include "peers/process_watch.h"

#include "base/proc.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>

namespace torch_ucx_rpc {

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
  // Asked with the descriptor open: its process can have ended by now, but its id cannot mean another one. If it has, the descriptor
  // is readable; that there is no answer may also be for want of a file to open.
  const std::optional<ProcStat> stat = readProcStat("/proc/" + std::to_string(member.pid));
  if (process < 0 || (stat && stat->startTicks != member.processStartTime)) {
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
