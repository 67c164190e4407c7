#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace torch_ucx_rpc::trace {

// Shows where the time of a call goes. With TORCH_UCX_RPC_TRACE=FILE, every process appends its spans to that file when
// its agent shuts down, in Chrome's trace event format (https://ui.perfetto.dev reads it). The spans of one call carry
// its id on both sides, and arrows lead from one process to the other. Clocks of one machine agree; those of several
// may not. Without the variable a span costs the test of a constant.
//
// With a recorder set, which torch's profiler is (rpc/profiled_spans.h), each span is reported to that too.
//
// Any thread may record. A thread's spans go to a buffer of its own, whose lock is contended only while it is written
// out.

// Constant once the library is loaded.
extern const bool isOn;

// Records all spans, on their threads: `begin` gets a span's name, and `end` the result of `begin`, unless that is
// null.
struct Recorder {
  void* (*begin)(const char* name);
  void (*end)(void* begun);
};
// The recorder must live as long as the process.
void setRecorder(const Recorder* recorder);

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
    if (const Recorder* recorder = recorder_.load(std::memory_order_relaxed); recorder != nullptr) {
      begun_ = recorder->begin(name);
    }
  }
  ~Span() {
    if (begun_ != nullptr) {
      recorder_.load(std::memory_order_relaxed)->end(begun_);
    }
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
  friend void setRecorder(const Recorder* recorder);

  static inline std::atomic<const Recorder*> recorder_{nullptr};

  static int64_t now();
  static void record(const Span& span);

  CallId call_;
  const char* const name_;
  const Arrow arrow_;
  int64_t began_ = 0;
  void* begun_ = nullptr; // by the recorder
};

// Appends the spans since the last call. The reader sees `process` as the name of this process.
void write(const std::string& process);

} // namespace torch_ucx_rpc::trace
