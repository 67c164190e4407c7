#pragma once

#include "cuda_numbers.h"
#include "cuda_stub.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

// The common beginning of the functions of the stub's libcuda.so.1, and the counts of their calls. The types are those
// of cuda.h.
namespace cuda_stub {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long; // NOLINT(google-runtime-int)
using CUcontext = struct Context*;
using CUstream = struct Stream*;
using CUevent = struct Event*;
using CUstreamCallback = void (*)(CUstream stream, CUresult status, void* argument);
using CUipcMemHandle = IpcMemHandle;
using CUuuid = Uuid;

inline std::atomic<bool> isUp{false}; // cuInit() has been called
inline std::atomic<bool> isDown{false}; // like CUDA after exit() has run its handlers

class Calls {
 public:
  static Calls& instance() {
    static auto* calls = new Calls();
    return *calls;
  }
  std::atomic<uint64_t>& of(const char* function) {
    const std::lock_guard lock(mutex_);
    return counts_[function];
  }
  void write() {
    const char* const name = std::getenv("CUDA_STUB_CALLS");
    if (name == nullptr) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (std::FILE* file = std::fopen((std::string(name) + "." + std::to_string(getpid())).c_str(), "w")) {
      for (const auto& [function, count] : counts_) {
        std::fprintf(file, "%s %llu\n", function.c_str(), static_cast<unsigned long long>(count.load()));
      }
      std::fclose(file);
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::atomic<uint64_t>> counts_;
};

// The functions of the driver begin with one of these, except cuGetErrorString: CALLED_EARLY if it does not need
// cuInit(), else CALLED.
//
// UCX writes a jump to the beginning of a function: 5 bytes, or 12 if its own code is more than 2 GiB away. It must
// know the instructions that it replaces. A frame of more than 127 bytes needs a longer instruction, so these
// beginnings take 14 bytes.
#define CALLED_EARLY()                                                    \
  do {                                                                    \
    [[maybe_unused]] std::array<char, 128> frame;                         \
    static std::atomic<uint64_t>& calls = Calls::instance().of(__func__); \
    calls.fetch_add(1);                                                   \
    if (isDown.load()) {                                                  \
      return kDeinitialized;                                              \
    }                                                                     \
  } while (false)
#define CALLED()              \
  do {                        \
    CALLED_EARLY();           \
    if (!isUp.load()) {       \
      return kNotInitialized; \
    }                         \
  } while (false)

inline uint64_t fromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::strtoull(value, nullptr, 10);
}

} // namespace cuda_stub
