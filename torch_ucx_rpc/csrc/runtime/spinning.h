#pragma once

#include "runtime/event_batch.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// How a thread that drives progress waits: asleep, with a wake-up of some 20 us when something comes; or polling, which uses a
// core. kAuto spins for a short time before it sleeps, where each process of the job has a core and the last waits were short.
enum class Waiting : uint8_t { kAuto, kPoll, kSleep };

// Decides whether a wait is spun through. Spinning pays where what one waits for comes soon, as between the calls of a loop,
// and costs a core's time where not: so it learns from the last waits, of leaders and of waiting callers apart, since one waits
// for the next request and the other for its answer. Guarded by the worker lock.
class Spinning {
 public:
  using Clock = std::chrono::steady_clock;
  // A wait is spun through up to this long: the time of a small call, with room for the callee's work, and of a step of torch's
  // engine between two messages of distributed autograd.
  static constexpr auto kLimit = std::chrono::microseconds(800);
  // Whoever is away for longer is missed: what comes meanwhile waits for a patrol.
  static constexpr auto kShortAbsence = std::chrono::microseconds(200);
  // What a sleeper's wait seems longer by.
  static constexpr auto kWakeUp = std::chrono::microseconds(50);
  // The same while data is on its way: its parts follow one another closely, and each sleep between two would cost more than they
  // take.
  static constexpr auto kTransferLimit = std::chrono::microseconds(20);
  // Looks that are further apart were interrupted.
  static constexpr auto kInterruption = std::chrono::microseconds(50);

  // Cores that this process may run on.
  static size_t usableCores();

  explicit Spinning(Waiting waiting, size_t cores = usableCores()) : waiting_(waiting), cores_(cores) {}

  void setProcessesHere(size_t processes) {
    processesHere_.store(processes);
  }

  // Whether each process of the job on this machine has a core. Where not, who waits must sleep: whoever it waits for then runs at
  // once when there is something to do, and not when all others have used up their slices.
  bool hasCoreEach() const {
    return cores_ > 1 && processesHere_.load() <= cores_;
  }
  // Whether waits are spun through at present.
  bool isOn(Role role) const;
  // Whether a thread that spins is likely to be back soon when it goes about what it was given.
  bool isBackSoon(Role role) const {
    return isOn(role) && absences_[static_cast<int>(role)].isMostlyShort();
  }
  void wasAway(Role role, Clock::duration time) {
    absences_[static_cast<int>(role)].add(time <= kShortAbsence);
  }

  // One wait, from the first time nothing was found until something is. Tests tell it the time.
  class Wait {
   public:
    Wait(Spinning& spinning, Role role) : spinning_(spinning), role_(role) {}
    // Nothing was found: whether to look again rather than sleep. Lets other threads run now and then.
    bool spin(bool isTransferring, Clock::time_point now = Clock::now());
    // Something moved, but it is not what one waits for.
    void again() {
      began_ = {};
    }
    // What one waits for was found. Returns the time.
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
  // How many of the last times were short: a moving average.
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
  Clock::time_point lastFound_{}; // what anybody waited for
};

} // namespace torch_ucx_rpc
