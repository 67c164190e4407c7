#include "base/trace.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_ucx_rpc::trace {

namespace {

// The most spans that a thread keeps: 12 MB, or some 60,000 calls. It drops later spans.
constexpr size_t kMaxSpans = 256 * 1024;

struct Record {
  const char* name;
  int64_t began; // nanoseconds
  int64_t ended;
  CallId call;
  Arrow arrow;
};

struct Buffer {
  std::mutex mutex; // contended only while it is written out
  // Guarded by mutex:
  std::vector<Record> records;
  size_t dropped = 0;
  long thread = gettid();
};

const char* fileName() {
  const char* name = std::getenv("TORCH_UCX_RPC_TRACE");
  return name != nullptr ? name : "";
}

std::mutex buffersMutex;
std::vector<std::shared_ptr<Buffer>>& buffers() {
  static auto* all = new std::vector<std::shared_ptr<Buffer>>; // threads may outlive static objects
  return *all;
}

// Returns this thread's buffer. The list shares it, because many threads end before write().
Buffer& threadBuffer() {
  thread_local const std::shared_ptr<Buffer> mine = [] {
    auto made = std::make_shared<Buffer>();
    const std::lock_guard lock(buffersMutex);
    buffers().push_back(made);
    return made;
  }();
  return *mine;
}

// The phases of the format: "X" is a span, "s" and "f" are the two ends of an arrow. An arrow begins where its span
// ends, and ends where its span begins.
void append(std::string& text, const Record& record, long thread) {
  char line[512];
  const double began = static_cast<double>(record.began) / 1000;
  const double ended = static_cast<double>(record.ended) / 1000;
  const int pid = getpid();
  (void)std::snprintf(
      line,
      sizeof(line),
      R"({"ph":"X","name":"%s","ts":%.3f,"dur":%.3f,"pid":%d,"tid":%ld,"args":{"call":"%016llx:%llu"}},)"
      "\n",
      record.name,
      began,
      ended - began,
      pid,
      thread,
      static_cast<unsigned long long>(record.call.session),
      static_cast<unsigned long long>(record.call.number));
  text += line;
  if (record.arrow != Arrow::kNone) {
    const bool leaves = record.arrow == Arrow::kRequestLeaves || record.arrow == Arrow::kAnswerLeaves;
    const bool isAnswer = record.arrow == Arrow::kAnswerLeaves || record.arrow == Arrow::kAnswerArrives;
    (void)std::snprintf(
        line,
        sizeof(line),
        R"({"ph":"%s","bp":"e","cat":"message","name":"%s","id":"%016llx:%llu","ts":%.3f,"pid":%d,"tid":%ld},)"
        "\n",
        leaves ? "s" : "f",
        isAnswer ? "answer" : "request",
        static_cast<unsigned long long>(record.call.session),
        static_cast<unsigned long long>(record.call.number),
        leaves ? ended : began,
        pid,
        thread);
    text += line;
  }
}

} // namespace

const bool isOn = *fileName() != '\0';

void setRecorder(const Recorder* recorder) {
  Span::recorder_.store(recorder);
}

int64_t Span::now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void Span::record(const Span& span) {
  Buffer& buffer = threadBuffer();
  const std::lock_guard lock(buffer.mutex);
  if (buffer.records.size() < kMaxSpans) {
    buffer.records.push_back({span.name_, span.began_, now(), span.call_, span.arrow_});
  } else {
    ++buffer.dropped;
  }
}

void write(const std::string& process) {
  if (!isOn) {
    return;
  }
  std::string text = R"({"ph":"M","name":"process_name","pid":)" + std::to_string(getpid()) + R"(,"args":{"name":")" +
      process + "\"}},\n";
  size_t dropped = 0;
  {
    const std::lock_guard lock(buffersMutex);
    for (const std::shared_ptr<Buffer>& buffer : buffers()) {
      const std::lock_guard bufferLock(buffer->mutex);
      for (const Record& record : buffer->records) {
        append(text, record, buffer->thread);
      }
      buffer->records.clear();
      dropped += std::exchange(buffer->dropped, 0);
    }
  }
  if (dropped != 0) {
    (void)std::fprintf(
        stderr,
        "torch_ucx_rpc: TORCH_UCX_RPC_TRACE lacks the last %zu spans of %s: a thread keeps %zu\n",
        dropped,
        process.c_str(),
        kMaxSpans);
  }
  const int fd = open(fileName(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) {
    std::perror("torch_ucx_rpc: cannot write TORCH_UCX_RPC_TRACE");
    return;
  }
  // Processes take turns to append. No process closes the JSON array: the format allows that.
  struct stat status{};
  if (flock(fd, LOCK_EX) == 0 && fstat(fd, &status) == 0 && status.st_size == 0) {
    text.insert(0, "[\n");
  }
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(fd, text.data() + done, text.size() - done);
    if (written <= 0) {
      std::perror("torch_ucx_rpc: cannot write TORCH_UCX_RPC_TRACE");
      break;
    }
    done += static_cast<size_t>(written);
  }
  close(fd);
}

} // namespace torch_ucx_rpc::trace
