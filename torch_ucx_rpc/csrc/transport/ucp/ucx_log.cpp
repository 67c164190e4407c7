#include "transport/ucp/ucx_log.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <utility>

namespace torch_ucx_rpc {

namespace {

constexpr auto kPatience = std::chrono::seconds(1);

// Log of the transport that UCX works for on this thread.
thread_local UcxLog* current = nullptr;

} // namespace

UcxLog::UcxLog() {
  // Adds the handler once in a process, and never removes it: UCX calls the handlers of all its users without a lock.
  [[maybe_unused]] static const bool isListening = [] {
    if (std::getenv("UCX_LOG_LEVEL") == nullptr) {
      ucs_log_push_handler(&UcxLog::onLine);
    }
    return true;
  }();
}

UcxLog::Working::Working(UcxLog& log, bool isLeaving)
    : log_(log), before_(std::exchange(current, &log)), wasLeaving_(std::exchange(log.isLeaving_, isLeaving)) {}

UcxLog::Working::~Working() {
  log_.isLeaving_ = wasLeaving_;
  current = before_;
}

ucs_log_func_rc_t UcxLog::onLine(
    const char* file,
    unsigned number,
    const char* function,
    ucs_log_level_t level,
    const ucs_log_component_config_t* component,
    const char* format,
    va_list arguments) {
  UcxLog* const log = current;
  if (log != nullptr && log->isLeaving_) {
    return level == UCS_LOG_LEVEL_WARN ? UCS_LOG_FUNC_RC_STOP : UCS_LOG_FUNC_RC_CONTINUE;
  }
  if (log == nullptr || level != UCS_LOG_LEVEL_ERROR || log->held_ == log->lines_.size()) {
    return UCS_LOG_FUNC_RC_CONTINUE;
  }
  Line& line = log->lines_[log->held_++];
  line.file = file;
  line.number = number;
  line.function = function;
  line.component = component;
  line.at = Clock::now();
  line.isExplained = line.at < log->explainedUntil_;
  va_list copy; // the next handler may need them too
  va_copy(copy, arguments);
  (void)vsnprintf(line.text.data(), line.text.size(), format, copy);
  va_end(copy);
  return UCS_LOG_FUNC_RC_STOP;
}

void UcxLog::explain() noexcept {
  explainedUntil_ = Clock::now() + kPatience;
  for (size_t index = 0; index < held_; ++index) {
    lines_[index].isExplained = true;
  }
}

std::string UcxLog::takeReason() noexcept {
  explain();
  if (std::exchange(held_, 0) == 0) {
    return {};
  }
  const Line& first = lines_.front();
  std::string_view file = first.file;
  file.remove_prefix(std::min(file.size(), file.rfind('/') + 1)); // npos + 1 is 0
  try {
    return " (" + std::string(file) + ":" + std::to_string(first.number) + ": " + first.text.data() + ")";
  } catch (const std::exception&) { // no memory
    return {};
  }
}

void UcxLog::showOldLines() {
  const Clock::time_point old = Clock::now() - kPatience;
  UcxLog* const before = std::exchange(current, nullptr);
  size_t kept = 0;
  for (size_t index = 0; index < held_; ++index) {
    const Line& line = lines_[index];
    if (line.at > old) {
      lines_[kept++] = line;
    } else if (!line.isExplained) {
      ucs_log_dispatch(
          line.file,
          line.number,
          line.function,
          UCS_LOG_LEVEL_ERROR,
          const_cast<ucs_log_component_config_t*>(line.component), // NOLINT: UCX only passes it on
          "%s",
          line.text.data());
    }
  }
  held_ = kept;
  current = before;
}

} // namespace torch_ucx_rpc
