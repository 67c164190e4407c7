#include "peers/process_watch.h"

#include "base/proc.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
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
  // Reads the start time after the descriptor was opened. If it is the member's, the member has had this id all the
  // time, so the descriptor is the member's too. If the member has ended since, the descriptor is readable. A missing
  // stat proves nothing: there may be no file left to open.
  const std::optional<ProcStat> stat = readProcStat("/proc/" + std::to_string(member.pid));
  if (process < 0 || (stat && stat->startTicks != member.processStartTime)) {
    if (process >= 0) {
      ::close(process);
    }
    return Outcome::kHasEnded;
  }
  const std::lock_guard lock(mutex_);
  try {
    watch_(process, std::move(onEnd));
  } catch (const std::exception&) {
    // The kernel gives this user no more watches. The heartbeat notices the end.
    ::close(process);
    return Outcome::kNotPossible;
  }
  processes_[member.session] = process;
  return Outcome::kWatched;
}

void ProcessWatch::forget(const Member& member) {
  const std::lock_guard lock(mutex_);
  const auto entry = processes_.find(member.session);
  if (entry != processes_.end()) {
    ::close(entry->second); // also takes it out of every epoll set
    processes_.erase(entry);
  }
}

} // namespace torch_ucx_rpc
