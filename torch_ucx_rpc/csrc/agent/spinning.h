#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_ucx_rpc {

// How a thread that drives progress waits: asleep, with a wake-up of some 20 us when something comes; or polling, which uses a
// core. kAuto spins for a short time before it sleeps, where each process of the job has a core and the last waits were short.
enum class Waiting : uint8_t { kAuto, kPoll, kSleep };

// Decides whether a wait is spun through. Spinning pays where what one waits for comes soon, as between the calls of a loop,
// and costs a core's time where not: so it learns from the last waits, of leaders and of visitors apart, since one waits
// for the next request and the other for its answer. Guarded by the worker lock.
class Spinning {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Who : uint8_t { kLeader, kVisitor };

  // A wait is spun through up to this long: the time of a small call, with room for the callee's work.
  static constexpr auto kLimit = std::chrono::microseconds(200);
  // Looks that are further apart were interrupted.
  static constexpr auto kInterruption = std::chrono::microseconds(50);
  // What a sleeper's wait seems longer by.
  static constexpr auto kWakeUp = std::chrono::microseconds(50);

  explicit Spinning(Waiting waiting);

  void setProcessesHere(size_t processes) {
    processesHere_.store(processes);
  }

  // One wait, from the first time nothing was found until something is.
  class Wait {
   public:
    Wait(Spinning& spinning, Who who) : spinning_(spinning), shortness_(spinning.shortness_[static_cast<int>(who)]) {}
    // Nothing was found: whether to look again rather than sleep. Lets other threads run now and then.
    bool spin();
    // Something was found.
    void end();

   private:
    Spinning& spinning_;
    int& shortness_;
    Clock::time_point began_{};
    Clock::time_point last_{};
    bool hasSpun_ = false;
    unsigned turns_ = 0;
  };

 private:
  // Of the last waits, how many were short: a moving average, 0 to kAlways.
  static constexpr int kAlways = 1024;

  const Waiting waiting_;
  const size_t cores_;
  std::atomic<size_t> processesHere_{1};
  int shortness_[2] = {0, 0};
};

} // namespace torch_ucx_rpc
