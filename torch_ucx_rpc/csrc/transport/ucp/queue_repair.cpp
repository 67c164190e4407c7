#include "transport/ucp/queue_repair.h"

#include "base/proc.h"

#include <c10/util/Logging.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

namespace torch_ucx_rpc {

namespace {

// A message takes UCX microseconds to copy into a slot: at most 64 KiB, 8 by default.
constexpr uint64_t kLongerThanAnyCopyMs = 50;

std::string directoryOf(pid_t process, pid_t thread) {
  return "/proc/" + std::to_string(process) + "/task/" + std::to_string(thread);
}

// One that is stopped or waits for memory to be read in (states T and D) may be in the middle of copying.
bool isAsleepOrEnded(const ProcStat& thread) {
  return thread.state == 'S' || thread.state == 'Z' || thread.state == 'X';
}

} // namespace

QueueRepair::Suspects::Suspects(const std::vector<pid_t>& processes) {
  for (const pid_t process : processes) {
    std::error_code ended;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", ended)) {
      const pid_t thread = std::stoi(task.path().filename());
      const std::optional<ProcStat> stat = readProcStat(task.path());
      if (thread != gettid() && stat && !isAsleepOrEnded(*stat)) {
        cpuTicks_.emplace(std::pair(process, thread), stat->cpuTicks);
      }
    }
  }
}

bool QueueRepair::Suspects::remain() {
  const uint64_t longEnough = kLongerThanAnyCopyMs * static_cast<uint64_t>(sysconf(_SC_CLK_TCK)) / 1000 + 1;
  std::erase_if(cpuTicks_, [longEnough](const auto& suspect) {
    const auto& [id, ticksBefore] = suspect;
    const std::optional<ProcStat> stat = readProcStat(directoryOf(id.first, id.second));
    return !stat || isAsleepOrEnded(*stat) || stat->cpuTicks >= ticksBefore + longEnough;
  });
  return !cpuTicks_.empty();
}

QueueRepair::QueueRepair(std::vector<SharedMemoryQueue> queues) {
  for (SharedMemoryQueue& queue : queues) {
    repairs_.push_back({std::move(queue), {}, {}, {}});
  }
}

bool QueueRepair::run() {
  bool isDone = true;
  for (Repair& repair : repairs_) {
    isDone = run(repair) && isDone;
  }
  return isDone;
}

bool QueueRepair::run(Repair& repair) {
  if (!repair.end) {
    repair.end = repair.queue.end();
  }
  const std::optional<SharedMemoryQueue::Position> slot = repair.queue.unwritten();
  if (!slot || *slot >= *repair.end) {
    repair.end.reset();
    repair.slot.reset();
    repair.suspects.reset();
    return true;
  }
  if (slot != repair.slot) {
    repair.slot = slot;
    repair.suspects.reset();
    return false; // where there is traffic, one is always just being written, and going through all processes takes long
  }
  if (!repair.suspects) {
    if (const std::optional<std::vector<pid_t>> processes = repair.queue.processes()) {
      repair.suspects.emplace(*processes);
    }
    return false; // even if nobody is suspected: who was writing may just have finished
  }
  // In this order: who was seen to have finished had marked it before.
  if (!repair.suspects->remain() && repair.queue.unwritten() == slot) {
    LOG(WARNING)
        << "torch_ucx_rpc: a process of this machine died while it was writing to this one over shared memory; its "
           "last message is dropped";
    repair.queue.skip(*slot);
  }
  return false;
}

} // namespace torch_ucx_rpc
