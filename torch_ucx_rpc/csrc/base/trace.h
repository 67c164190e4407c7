#pragma once

#include <cstdint>
#include <string>

namespace torch_ucx_rpc::trace {

// Shows where the time of a call goes. With TORCH_UCX_RPC_TRACE=FILE, every process appends its spans to that file when
// its agent shuts down, in Chrome's trace event format (https://ui.perfetto.dev reads it). The spans of one call carry
// its id on both sides, and arrows lead from one process to the other. Clocks of one machine agree; those of several
// may not. Without the variable a span costs the test of a constant.
//
// Any thread may record. A thread's spans go to a buffer of its own, whose lock is contended only while it is written
// out.

// Constant once the library is loaded.
extern const bool isOn;

// Names a call alike in all processes.
struct CallId {
  uint64_t session = 0; // of the caller
  uint64_t number = 0;
};

// Leads from the span in which a message leaves one process to the span in which it arrives at another.
enum class Arrow : uint8_t { kNone, kRequestLeaves, kRequestArrives, kAnswerLeaves, kAnswerArrives };

// Records what happens on this thread during the life of the object. `name` must be a literal: only its address is
// kept.
class Span {
 public:
  explicit Span(const char* name, CallId call = {}, Arrow arrow = Arrow::kNone)
      : call_(call), name_(name), arrow_(arrow) {
    if (isOn) {
      began_ = now();
    }
  }
  ~Span() {
    if (isOn) {
      record(*this);
    }
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // For a call that has no id yet when the span begins.
  void belongsTo(CallId call) {
    call_ = call;
  }

 private:
  static int64_t now();
  static void record(const Span& span);

  CallId call_;
  const char* const name_;
  const Arrow arrow_;
  int64_t began_ = 0;
};

// Appends what was recorded since the last call. The reader sees `process` as the name of this process.
void write(const std::string& process);

} // namespace torch_ucx_rpc::trace
