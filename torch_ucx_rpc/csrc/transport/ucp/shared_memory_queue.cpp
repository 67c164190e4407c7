#include "transport/ucp/shared_memory_queue.h"

#include "base/proc.h"

#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>

namespace torch_ucx_rpc {

namespace {

constexpr size_t kCacheLine = 64; // UCS_SYS_CACHE_LINE_SIZE of x86-64 and aarch64
constexpr uint64_t kArmed = uint64_t{1} << 63; // in Control::head: the receiver wants a signal
constexpr uint8_t kOwner = 1; // in Slot::flags: toggles in each round of the ring
constexpr uint8_t kInline = 2; // in Slot::flags: the message is in the slot itself
constexpr uint8_t kHandlers = 32; // UCT_AM_ID_MAX: Slot::handler is below
constexpr ino_t kFirstPidNamespace = 0xEFFFFFFC; // PROC_PID_INIT_INO of linux/proc_ns.h

} // namespace

// uct_mm_fifo_ctl_t
struct SharedMemoryQueue::Control {
  alignas(kCacheLine) uint64_t head;
  socklen_t signalAddressBytes;
  sockaddr_un signalAddress;
  alignas(kCacheLine) uint64_t tail; // entries read so far; published now and then
  pid_t owner;
};

// uct_mm_fifo_element_t
struct [[gnu::packed]] SharedMemoryQueue::Slot {
  uint8_t flags;
  uint8_t handler;
  uint16_t bytes;
  uint64_t segment; // where longer messages are written
  uint32_t segmentBytes;
  uint32_t segmentOffset;
  void* receiversAddress;
};

// A message that UCP drops silently: the acknowledgement of an unknown rendezvous. Such messages do come, from peers
// that this side has given up.
struct [[gnu::packed]] SharedMemoryQueue::Acknowledgement { // ucp_reply_hdr_t
  static constexpr uint8_t kHandler = 10; // UCP_AM_ID_RNDV_ATS

  uint64_t request = ~uint64_t{0}; // odd, so UCP looks it up in a table, whose ids count up and never reach this number
  int8_t status = 0;
};

// A line of /proc/PID/maps, see proc(5).
struct SharedMemoryQueue::Mapping {
  uintptr_t begin;
  uintptr_t end;
  std::string object;
  std::optional<int> segment;
};

std::optional<std::vector<SharedMemoryQueue::Mapping>> SharedMemoryQueue::mappingsOf(const std::string& process) {
  const std::optional<std::string> text = readProcFile("/proc/" + process + "/maps");
  if (!text) {
    return std::nullopt;
  }
  std::vector<Mapping> mappings;
  std::istringstream file(*text);
  for (std::string line; std::getline(file, line);) {
    // The names that UCX's transports posix and sysv leave. This looks at no other memory: reading a device's memory
    // may have side effects.
    if (line.find("/ucx_shm_posix_") == std::string::npos && line.find("/SYSV") == std::string::npos) {
      continue;
    }
    std::istringstream fields(line);
    Mapping mapping{};
    char dash = 0;
    std::string permissions;
    std::string offset;
    std::string device;
    std::string inode;
    fields >> std::hex >> mapping.begin >> dash >> mapping.end >> permissions >> offset >> device >> inode;
    // The kernel may show one attachment in several lines. Only the line of its first byte counts.
    if (permissions == "rw-s" && std::stoull(offset, nullptr, 16) == 0) {
      mapping.object = device + " " + inode;
      if (line.find("/SYSV") != std::string::npos) {
        mapping.segment = std::stoi(inode);
      }
      mappings.push_back(std::move(mapping));
    }
  }
  return mappings;
}

std::set<uintptr_t> SharedMemoryQueue::mapped() {
  std::set<uintptr_t> begins;
  for (const Mapping& mapping : mappingsOf("self").value_or(std::vector<Mapping>())) {
    begins.insert(mapping.begin);
  }
  return begins;
}

std::vector<SharedMemoryQueue> SharedMemoryQueue::mappedSince(const std::set<uintptr_t>& before) {
  std::vector<SharedMemoryQueue> queues;
  for (const Mapping& mapping : mappingsOf("self").value_or(std::vector<Mapping>())) {
    if (!before.contains(mapping.begin)) {
      if (std::optional<SharedMemoryQueue> queue = recognize(mapping)) {
        queues.push_back(std::move(*queue));
      }
    }
  }
  return queues;
}

std::optional<SharedMemoryQueue> SharedMemoryQueue::recognize(const Mapping& mapping) {
  static_assert(offsetof(Control, signalAddressBytes) == 8 && offsetof(Control, signalAddress) == 12);
  static_assert(offsetof(Control, tail) == 2 * kCacheLine && sizeof(Control) == 3 * kCacheLine && sizeof(Slot) == 28);
  const size_t bytes = mapping.end - mapping.begin;
  auto* const control = reinterpret_cast<Control*>(mapping.begin); // NOLINT(performance-no-int-to-ptr)
  if (bytes < sizeof(Control) + sizeof(Slot) || control->owner != getpid() ||
      control->signalAddress.sun_family != AF_UNIX || (control->head & ~kArmed) != 0 || control->tail != 0) {
    return std::nullopt;
  }
  auto* const slots = reinterpret_cast<std::byte*>(control + 1);
  const auto isNew = [&, first = reinterpret_cast<const Slot*>(slots)](size_t offset) {
    if (sizeof(Control) + offset + sizeof(Slot) > bytes) {
      return false;
    }
    const auto* slot = reinterpret_cast<const Slot*>(slots + offset);
    return slot->flags == kOwner && slot->handler == 0 && slot->bytes == 0 &&
        slot->segmentBytes == first->segmentBytes && slot->segmentBytes != 0 && slot->receiversAddress != nullptr;
  };
  // The distance between two slots is a UCX option. So this searches for the second slot, which looks like the first.
  size_t stride = sizeof(Slot);
  while (stride < bytes && !isNew(stride)) {
    ++stride;
  }
  size_t count = 0;
  while (isNew(count * stride)) {
    ++count;
  }
  if (count < 2 || !std::has_single_bit(count) || stride < sizeof(Slot) + sizeof(Acknowledgement)) {
    return std::nullopt;
  }
  SharedMemoryQueue queue;
  queue.object_ = mapping.object;
  queue.segment_ = mapping.segment;
  queue.control_ = control;
  queue.slots_ = slots;
  queue.count_ = count;
  queue.stride_ = stride;
  return queue;
}

SharedMemoryQueue::Slot& SharedMemoryQueue::slotAt(Position position) const {
  return *reinterpret_cast<Slot*>(slots_ + (position & (count_ - 1)) * stride_);
}

uint8_t SharedMemoryQueue::markAt(Position position) const {
  return (position & count_) != 0 ? kOwner : 0; // new slots have kOwner, so the first round writes 0
}

SharedMemoryQueue::Position SharedMemoryQueue::end() const {
  return std::atomic_ref(control_->head).load(std::memory_order_acquire) & ~kArmed;
}

std::optional<SharedMemoryQueue::Position> SharedMemoryQueue::unwritten() const {
  const Position last = end();
  for (Position slot = std::atomic_ref(control_->tail).load(std::memory_order_acquire); slot < last; ++slot) {
    const uint8_t flags = std::atomic_ref(slotAt(slot).flags).load(std::memory_order_acquire);
    if ((flags & kOwner) != markAt(slot)) {
      return slot;
    }
  }
  return std::nullopt;
}

void SharedMemoryQueue::skip(Position position) {
  Slot& slot = slotAt(position);
  const Acknowledgement message;
  // The mark comes last, and with release: UCX reads the slot as soon as it sees the mark.
  std::memcpy(&slot + 1, &message, sizeof(message));
  slot.handler = Acknowledgement::kHandler;
  slot.bytes = sizeof(message);
  std::atomic_ref(slot.flags).store(kInline | markAt(position), std::memory_order_release);
}

bool SharedMemoryQueue::isConsistent() const {
  const Position last = unwritten().value_or(end());
  for (Position slot = last > count_ ? last - count_ : 0; slot < last; ++slot) {
    const Slot& used = slotAt(slot);
    const uint8_t flags = std::atomic_ref(slotAt(slot).flags).load(std::memory_order_acquire);
    if (slot + count_ < end()) {
      continue; // a sender has taken it again
    }
    const bool isLikeUcx = (flags & ~(kOwner | kInline)) == 0 && used.handler < kHandlers && used.segmentBytes != 0;
    if (!isLikeUcx || (flags & kOwner) != markAt(slot)) {
      return false;
    }
  }
  return true;
}

bool SharedMemoryQueue::mayHideMappings(const std::string& process, int why) {
  if (why == ENOENT || why == ESRCH) {
    return false; // it has ended
  }
  if (process == "1") {
    return false; // the machine's init, which is not a worker, and which even root may not be able to inspect
  }
  const std::string status = readProcFile("/proc/" + process + "/status").value_or("");
  const size_t user = status.find("\nUid:");
  return user == std::string::npos ? errno != ENOENT && errno != ESRCH
                                   : std::stoul(status.substr(user + 5)) == geteuid();
}

std::optional<std::vector<pid_t>> SharedMemoryQueue::processes() const {
  std::vector<pid_t> found;
  size_t attachments = 0;
  bool mayBeHidden = false;
  std::error_code ended; // another process may have ended in between
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ended)) {
    const std::string name = entry.path().filename();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char letter) { return std::isdigit(letter) != 0; })) {
      continue;
    }
    const std::optional<std::vector<Mapping>> mappings = mappingsOf(name);
    if (!mappings) {
      mayBeHidden |= mayHideMappings(name, errno);
      continue;
    }
    const auto here = std::count_if(
        mappings->begin(), mappings->end(), [this](const Mapping& mapping) { return mapping.object == object_; });
    if (here != 0) {
      found.push_back(std::stoi(name));
      attachments += static_cast<size_t>(here);
    }
  }
  if (std::find(found.begin(), found.end(), getpid()) == found.end()) {
    return std::nullopt;
  }
  if (segment_) {
    shmid_ds state{};
    return shmctl(*segment_, IPC_STAT, &state) == 0 && state.shm_nattch <= attachments ? std::optional(std::move(found))
                                                                                       : std::nullopt;
  }
  struct stat space{};
  const bool seesAll = stat("/proc/self/ns/pid", &space) == 0 && space.st_ino == kFirstPidNamespace;
  return seesAll && !mayBeHidden ? std::optional(std::move(found)) : std::nullopt;
}

} // namespace torch_ucx_rpc
