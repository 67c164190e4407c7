#pragma once

#include "runtime/event_batch.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// How a thread that drives progress waits. A sleeping thread needs some 20 us to wake up when something arrives. A
// polling thread uses a core. kAuto spins for a short time before it sleeps, if each process of the job has a core and
// the last waits were short.
enum class Waiting : uint8_t { kAuto, kPoll, kSleep };

// Decides whether a driver spins through a wait or sleeps. Spinning pays if the awaited event comes soon, as between
// the calls of a loop; otherwise it wastes a core. The decision is learned from the last waits. Leaders and waiting
// callers are counted separately, since a leader waits for the next request and a caller for its answer. Guarded by the
// worker lock, except setProcessesHere().
class Spinning {
 public:
  using Clock = std::chrono::steady_clock;
  // With kAuto, the longest time to spin through one wait. It fits a small call, with room for the callee's work. It
  // also fits a step of torch's engine between two messages of distributed autograd.
  static constexpr auto kLimit = std::chrono::microseconds(800);
  // If a driver is away for longer than this, arrivals wait until a leader that polls takes over.
  static constexpr auto kShortAbsence = std::chrono::microseconds(200);
  // A wait in which the thread slept seems longer by this much.
  static constexpr auto kWakeUp = std::chrono::microseconds(50);
  // For this long a driver spins while data is on its way, even where spinning is off. The parts of a transfer follow
  // one another closely, and a sleep between two parts would take longer than a part.
  static constexpr auto kTransferLimit = std::chrono::microseconds(20);
  // The same where devices are in use: as long as for a message. A device copies for longer, and the other side needs
  // no core for it. On an H100, a limit of 100 us made a call with 64 MiB take 50 % longer.
  static constexpr auto kDeviceLimit = kLimit;
  static constexpr auto kDeviceLimitToSleep = std::chrono::microseconds(100); // with Waiting::kSleep
  // A longer time between two looks means that the thread was interrupted.
  static constexpr auto kInterruption = std::chrono::microseconds(50);

  // A driver always waits for the messages that others may send. Besides these it may wait for data on its way, or for
  // a device that works or copies.
  enum class Awaited : uint8_t { kMessage, kTransfer, kDevice };

  // The number of cores that this process may run on.
  static size_t usableCores();

  explicit Spinning(Waiting waiting, size_t cores = usableCores()) : waiting_(waiting), cores_(cores) {}

  void setProcessesHere(size_t processes) {
    processesHere_.store(processes);
  }

  // Whether each process of the job on this machine has a core. If not, waiting threads must sleep. The awaited process
  // then runs as soon as it has something to do, instead of after the time slices of all others.
  bool hasCoreEach() const {
    return cores_ > 1 && processesHere_.load() <= cores_;
  }
  // Whether drivers of this role spin through their waits at present.
  bool isOn(Role role) const;
  // Whether a driver that spins is likely to return soon after it leaves to handle events.
  bool isBackSoon(Role role) const {
    return isOn(role) && absences_[static_cast<int>(role)].isMostlyShort();
  }
  void wasAway(Role role, Clock::duration time) {
    absences_[static_cast<int>(role)].add(time <= kShortAbsence);
  }

  // One wait: from the first look that found nothing to the one that finds the awaited event. `now` is an
  // argument for tests.
  class Wait {
   public:
    Wait(Spinning& spinning, Role role) : spinning_(spinning), role_(role) {}
    // Called after a look that found nothing. True: look again; false: sleep. Lets other threads run now and then.
    bool spin(Awaited awaited, Clock::time_point now = Clock::now());
    // Something moved, but not the awaited event: the wait starts again.
    void again() {
      began_ = {};
    }
    // The awaited event was found. Learns from the wait, and returns the present time.
    Clock::time_point end(Clock::time_point now = Clock::now());

   private:
    Spinning& spinning_;
    const Role role_;
    Clock::time_point began_{};
    Clock::time_point last_{};
    bool hasSpun_ = false;
    unsigned turns_ = 0;
  };

 private:
  // The share of the last times that were short: a moving average. It falls faster than it rises. From the full share,
  // three long times in a row make it less than half; from none, eleven short ones make it more.
  class Shortness {
   public:
    bool isMostlyShort() const {
      return share_ > kAlways / 2;
    }
    void add(bool isShort) {
      share_ += isShort ? (kAlways - share_) / 16 : -share_ / 4;
    }

   private:
    static constexpr int kAlways = 1024;
    int share_ = 0;
  };

  const Waiting waiting_;
  const size_t cores_;
  std::atomic<size_t> processesHere_{1};
  Shortness waits_[2];
  Shortness absences_[2];
  Clock::time_point lastFound_{}; // when a driver last found its awaited event
};

} // namespace torch_ucx_rpc
