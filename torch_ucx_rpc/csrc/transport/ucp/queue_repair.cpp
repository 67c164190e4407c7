#include "transport/ucp/queue_repair.h"

#include "base/proc.h"
#include "base/warnings.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

namespace torch_ucx_rpc {

namespace {

// The versions of UCX with which the tests have passed, and all between them.
constexpr std::pair<int, int> kOldestTested{1, 14};
constexpr std::pair<int, int> kNewestTested{1, 22};

// UCX copies a message into a slot within microseconds. A message there has at most 64 KiB, and 8 KiB by default.
constexpr uint64_t kLongerThanAnyCopyMs = 50;

// Scans for one slot before the state is kUnrepairable: one second at the agent's pace of 20 ms. After that, one scan
// in kMaxScans looks again for processes that could not be seen. Each scan checks the suspects, which costs little.
constexpr unsigned kMaxScans = 50;

std::string dotted(std::pair<int, int> version) {
  return std::to_string(version.first) + "." + std::to_string(version.second);
}

std::string directoryOf(pid_t process, pid_t thread) {
  return "/proc/" + std::to_string(process) + "/task/" + std::to_string(thread);
}

// Reads the facts about a thread. Returns nothing if it has ended. Throws if that is unknown: this process may open no
// more files, for instance.
std::optional<ProcStat> readLiving(const std::string& thread) {
  const std::optional<ProcStat> stat = readProcStat(thread);
  if (!stat && errno != ENOENT && errno != ESRCH) {
    throw std::system_error(errno, std::generic_category(), thread);
  }
  return stat && stat->state != 'Z' && stat->state != 'X' ? stat : std::nullopt;
}

// True if the thread cannot be in the middle of writing a slot.
bool isElsewhere(const std::string& thread) {
  return !readLiving(thread) || isInSystemCall(thread);
}

} // namespace

std::string whyQueuesAreNotRepaired(const std::string& ucxVersion) {
  std::pair<int, int> version{0, 0};
  if (std::sscanf(ucxVersion.c_str(), "%d.%d", &version.first, &version.second) != 2) {
    return "'" + ucxVersion + "' is not a version of UCX";
  }
  if (version < kOldestTested || version > kNewestTested) {
    return "UCX " + dotted(version) + " was not tested; " + dotted(kOldestTested) + " to " + dotted(kNewestTested) +
        " were";
  }
  return "";
}

QueueRepair::Suspects::Suspects(const std::vector<pid_t>& processes) {
  for (const pid_t process : processes) {
    std::error_code why;
    const std::filesystem::directory_iterator tasks("/proc/" + std::to_string(process) + "/task", why);
    if (why && why.value() != ENOENT && why.value() != ESRCH) {
      throw std::system_error(why);
    }
    for (const auto& task : tasks) {
      const pid_t thread = std::stoi(task.path().filename());
      if (thread == gettid()) {
        continue;
      }
      // Reads the thread's time first, so that its run between the two looks counts.
      const std::optional<ProcStat> stat = readLiving(task.path());
      if (stat && !isElsewhere(task.path())) {
        cpuTicks_.emplace(std::pair(process, thread), stat->cpuTicks);
      }
    }
  }
}

bool QueueRepair::Suspects::remain() {
  const uint64_t longEnough = kLongerThanAnyCopyMs * static_cast<uint64_t>(sysconf(_SC_CLK_TCK)) / 1000 + 1;
  std::erase_if(cpuTicks_, [longEnough](const auto& suspect) {
    const auto& [id, ticksBefore] = suspect;
    const std::string thread = directoryOf(id.first, id.second);
    const std::optional<ProcStat> stat = readLiving(thread);
    return !stat || stat->cpuTicks >= ticksBefore + longEnough || isElsewhere(thread);
  });
  return !cpuTicks_.empty();
}

QueueRepair::QueueRepair(std::vector<SharedMemoryQueue> queues, std::string whyNot)
    : description_(whyNot.empty() ? "on" : "off: " + whyNot) {
  if (!whyNot.empty()) {
    return;
  }
  for (SharedMemoryQueue& queue : queues) {
    repairs_.push_back(Repair{std::move(queue), {}, {}, {}, Finding::kNone, {}, {}, 0, 0});
  }
}

RepairState QueueRepair::state() {
  RepairState worst = RepairState::kWhole;
  for (Repair& repair : repairs_) {
    worst = std::max(worst, state(repair));
  }
  return worst;
}

RepairState QueueRepair::state(Repair& repair) {
  // Only slots that were taken by now are of interest. Otherwise traffic would keep the state from ever being kWhole.
  if (!repair.end) {
    repair.end = repair.queue.end();
  }
  const std::optional<SharedMemoryQueue::Position> slot = repair.queue.unwritten();
  if (!slot || *slot >= *repair.end) {
    repair.end.reset();
    repair.slot.reset();
    ask(repair, std::nullopt);
    return RepairState::kWhole;
  }
  if (slot != repair.slot) {
    // Under traffic, some slot is always being written. So no scan is asked for before the second look at the same
    // slot.
    repair.slot = slot;
    ask(repair, std::nullopt);
    return RepairState::kUndecided;
  }
  Finding finding = Finding::kNone;
  {
    const std::lock_guard lock(mutex_);
    finding = repair.asked == slot ? repair.finding : Finding::kNone;
  }
  ask(repair, slot);
  if (finding == Finding::kNobodyWrites) {
    // Looks at the slot again after the scan. A writer that the scan saw elsewhere had marked the slot before. If the
    // slot is still unmarked, its writer is dead.
    if (repair.queue.unwritten() == slot) {
      if (!repair.queue.isConsistent()) {
        return RepairState::kUnrepairable;
      }
      warn(
          "a process of this machine died while it was writing to this process over shared memory; its last message is "
          "dropped");
      repair.queue.skip(*slot);
    }
    return RepairState::kUndecided; // there may be more such slots behind it
  }
  return finding == Finding::kUnsure ? RepairState::kUnrepairable : RepairState::kUndecided;
}

void QueueRepair::ask(Repair& repair, std::optional<SharedMemoryQueue::Position> slot) {
  const std::lock_guard lock(mutex_);
  if (repair.asked != slot) {
    repair.asked = slot;
    repair.finding = Finding::kNone;
  }
}

void QueueRepair::scan() {
  for (Repair& repair : repairs_) {
    std::optional<SharedMemoryQueue::Position> slot;
    {
      const std::lock_guard lock(mutex_);
      slot = repair.asked;
    }
    if (!slot) {
      continue;
    }
    const Finding finding = look(repair, *slot);
    const std::lock_guard lock(mutex_);
    // state() may ask for another slot by now. This finding says nothing about that slot.
    if (repair.asked == slot) {
      repair.finding = finding;
    }
  }
}

QueueRepair::Finding QueueRepair::look(Repair& repair, SharedMemoryQueue::Position slot) {
  if (repair.scanned != slot) {
    repair.scanned = slot;
    repair.suspects.reset();
    repair.blindScans = 0;
    repair.suspectScans = 0;
  }
  try {
    if (!repair.suspects && (repair.blindScans < kMaxScans || repair.blindScans % kMaxScans == 0)) {
      if (const std::optional<std::vector<pid_t>> processes = repair.queue.processes()) {
        repair.suspects.emplace(*processes);
      }
    }
  } catch (const std::exception&) { // no memory, or an unknown form of /proc: counts as blind
    repair.suspects.reset();
  }
  if (!repair.suspects) {
    return ++repair.blindScans >= kMaxScans ? Finding::kUnsure : Finding::kNone;
  }
  try {
    if (!repair.suspects->remain()) {
      return Finding::kNobodyWrites;
    }
  } catch (const std::exception&) { // the next scan asks again about the suspects that are left
  }
  return ++repair.suspectScans >= kMaxScans ? Finding::kUnsure : Finding::kNone;
}

} // namespace torch_ucx_rpc
