#pragma once

#include <ucs/debug/log_def.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>

namespace torch_ucx_rpc {

// At an error UCX returns a status, and also writes a line to its log, which is stdout. Its log level "error" means
// "error is returned to the user" (ucs/config/types.h). If a worker dies while another connects, such lines are
// ordinary, and the transport reports the failure. So this class holds back the lines that UCX writes while it works
// for a transport. A failure explains a line if the transport reports it within a second before or after the line. The
// lanes of an endpoint may fail one after the other. The failure takes the first line into its text. A line that no
// failure explains appears a second later, as UCX would have shown it.
//
// UCX also warns of each request that a worker has when the worker is destroyed. A transport that has given up requests
// to dead workers expects these warnings, and drops them.
//
// UCX shows everything else as usual: other warnings, and what UCX says when it starts a worker. The same holds for
// lines of UCX's own thread and of other users of UCX in this process. If UCX_LOG_LEVEL is set, UCX shows all lines.
// Fatal lines do not come this way.
//
// The worker lock guards it. Holding a line back takes no memory and no lock.
class UcxLog {
 public:
  UcxLog();
  UcxLog(const UcxLog&) = delete;
  UcxLog& operator=(const UcxLog&) = delete;

  // While it lives, UCX works for this transport on this thread. With `isLeaving`, UCX destroys the transport's worker,
  // and this class drops warnings of requests that were left behind.
  class Working {
   public:
    explicit Working(UcxLog& log, bool isLeaving = false);
    ~Working();
    Working(const Working&) = delete;
    Working& operator=(const Working&) = delete;

   private:
    UcxLog& log_;
    UcxLog* const before_;
    const bool wasLeaving_;
  };

  // Call it when the transport reports a failure, or gives an endpoint up. Lines so far, and lines of the next second,
  // are not shown.
  void explain() noexcept;
  // Does what explain() does, for the failure of an endpoint. Returns the first line for its text, " (mm_sysv.c:61:
  // shmat(...) failed: ...)"; empty if there is none. Returns it only once.
  std::string takeReason() noexcept;
  // Shows what has been held back for too long.
  void showOld() {
    if (held_ != 0) { // which is seldom
      showOldLines();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Line {
    const char* file; // a literal of UCX's, like the function
    unsigned number;
    const char* function;
    const ucs_log_component_config_t* component;
    Clock::time_point at;
    bool isExplained;
    std::array<char, 256> text; // cut if it is longer
  };

  static ucs_log_func_rc_t onLine(
      const char* file,
      unsigned number,
      const char* function,
      ucs_log_level_t level,
      const ucs_log_component_config_t* component,
      const char* format,
      va_list arguments);

  void showOldLines();

  std::array<Line, 16> lines_; // further ones are shown at once
  size_t held_ = 0;
  bool isLeaving_ = false;
  Clock::time_point explainedUntil_;
};

} // namespace torch_ucx_rpc
