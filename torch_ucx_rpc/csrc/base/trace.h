#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace torch_ucx_rpc::trace {

// Shows where the time of a call goes. With TORCH_UCX_RPC_TRACE=FILE, every process appends its spans to that file when
// its agent shuts down. The file has Chrome's trace event format, which https://ui.perfetto.dev reads. The spans of one
// call carry its id on both sides, and arrows lead from one process to the other. Processes of one machine share a
// clock; the clocks of several machines may differ. With neither the variable nor a recorder, a span costs a few
// branches.
//
// If a recorder is set, it gets each span too. torch's profiler is one (rpc/profiled_spans.h).
//
// Any thread may record. Each thread has its own buffer, whose lock is contended only during write().

// Constant once the library is loaded.
extern const bool isOn;

// Gets all spans, each on its thread: `begin` gets the span's name, and `end` the result of `begin`, unless that is
// null.
struct Recorder {
  void* (*begin)(const char* name);
  void (*end)(void* begun);
};
// The recorder must live as long as the process.
void setRecorder(const Recorder* recorder);

// Identifies a call in all processes.
struct CallId {
  uint64_t session = 0; // of the caller
  uint64_t number = 0;
};

// The end of an arrow at a span. An arrow leads from the span that sends a message to the span that receives it.
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

  // Sets the call of a span that began before the call had an id.
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
  void* begun_ = nullptr; // what the recorder's `begin` returned
};

// Appends the spans since the previous write(). The reader sees `process` as the name of this process.
void write(const std::string& process);

} // namespace torch_ucx_rpc::trace
