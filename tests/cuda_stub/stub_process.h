#pragma once

// The processes of tests with the driver of cuda_stub.h: their start, a connection beside UCX, and their output.

#include "cuda_stub.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

extern "C" { // the part of cuda.h that a program with device memory needs
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxPushCurrent_v2(void* context);
int cuMemAlloc_v2(uint64_t* at, size_t bytes);
int cuMemAllocAsync(uint64_t* at, size_t bytes, void* stream);
int cuMemAddressReserve(uint64_t* at, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags);
int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
int cuMemFree_v2(uint64_t at);

// From ucs/config/global_opts.h: UCX has read these variables when it was loaded, in the process that forks.
int ucs_global_opts_set_value(const char* name, const char* value);
}

namespace torch_ucx_rpc {

// ---------------------------------------------------------------------------------------------------- in a process

[[noreturn]] inline void fail(const std::string& why) {
  std::cout << "failed: " << why << std::endl;
  _exit(1);
}

inline void require(bool holds, const std::string& what) {
  if (!holds) {
    fail(what);
  }
}

// UCX's CUDA transports are linked against both libraries of the driver. This program is linked against libcuda.so.1,
// so it loads the other library.
inline void haveTheDriver() {
  require(dlopen(CUDA_STUB_NVML, RTLD_NOW | RTLD_GLOBAL) != nullptr, "no libnvidia-ml.so.1");
}

// Does what torch does for the first tensor.
inline void useTheDevice() {
  haveTheDriver();
  void* context = nullptr;
  require(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxPushCurrent_v2(context) == 0, "no CUDA");
}

// The kinds of device memory that a program may have.
enum class DeviceMemory {
  kPlain, // of cudaMalloc, hence of torch
  kPool, // of cudaMallocAsync
  kVirtual, // of torch's expandable_segments
};

inline std::byte* allocateOnDevice(DeviceMemory kind, uint64_t bytes) {
  uint64_t at = 0;
  switch (kind) {
    case DeviceMemory::kPool:
      require(cuMemAllocAsync(&at, bytes, nullptr) == 0, "no device memory");
      break;
    case DeviceMemory::kVirtual:
      require(cuMemAddressReserve(&at, bytes, 0, 0, 0) == 0 && cuMemMap(at, bytes, 0, 0, 0) == 0, "no device memory");
      break;
    case DeviceMemory::kPlain:
      require(cuMemAlloc_v2(&at, bytes) == 0, "no device memory");
  }
  return reinterpret_cast<std::byte*>(at); // NOLINT: as CUDA does
}

inline void freeOnDevice(std::byte* at) {
  (void)cuMemFree_v2(reinterpret_cast<uint64_t>(at)); // NOLINT: as CUDA does
}

// One end of a connection between the two processes of a test, beside UCX.
class Socket {
 public:
  explicit Socket(int socket) : socket_(socket) {}

  void tell(const std::string& what) const {
    require(send(socket_, what.data(), what.size(), 0) == static_cast<ssize_t>(what.size()), "the other is gone");
  }
  std::string hear() const {
    std::string heard(64 * 1024, '\0');
    const ssize_t bytes = recv(socket_, heard.data(), heard.size(), 0);
    require(bytes > 0, "the other is gone");
    heard.resize(static_cast<size_t>(bytes));
    return heard;
  }
  bool hasHeard() const {
    pollfd event{socket_, POLLIN, 0};
    return poll(&event, 1, 0) == 1;
  }
  int fd() const {
    return socket_;
  }

 private:
  const int socket_;
};

// ------------------------------------------------------------------------------------------------ of the processes

using Environment = std::map<std::string, std::string>;

// A process of a test, and its output.
class Process {
 public:
  Process(const Environment& environment, const std::function<void()>& body) {
    std::cout.flush();
    id_ = fork();
    if (id_ == 0) {
      dup2(fileno(output_), STDOUT_FILENO);
      dup2(fileno(output_), STDERR_FILENO);
      setvbuf(stdout, nullptr, _IONBF, 0);
      for (const auto& [name, value] : environment) {
        setenv(name.c_str(), value.c_str(), 1);
        if (name == "UCX_MEMTYPE_CACHE") {
          require(ucs_global_opts_set_value("MEMTYPE_CACHE", value.c_str()) == 0, "UCX has no such setting");
        }
      }
      try {
        body();
      } catch (const std::exception& thrown) { // or this process would run the other tests too
        fail(thrown.what());
      }
      std::exit(0);
    }
  }
  ~Process() {
    std::fclose(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Waits for the end of the process. Returns its output.
  const std::string& written() {
    if (id_ != 0) {
      waitpid(std::exchange(id_, 0), &status_, 0);
      std::rewind(output_);
      std::array<char, 4096> some{};
      for (size_t bytes = 0; (bytes = std::fread(some.data(), 1, some.size(), output_)) != 0;) {
        written_.append(some.data(), bytes);
      }
    }
    return written_;
  }
  bool hasSucceeded() {
    (void)written();
    return status_ == 0;
  }
  bool hasWritten(const std::string& text) {
    return written().find(text) != std::string::npos;
  }
  // Returns the number in the line "name=number".
  uint64_t count(const std::string& name) {
    std::istringstream lines(written());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(name + "=")) {
        return std::stoull(line.substr(name.size() + 1));
      }
    }
    ADD_FAILURE() << name << " has not been counted";
    return 0;
  }

 private:
  std::FILE* const output_ = std::tmpfile();
  pid_t id_ = 0;
  int status_ = 0;
  std::string written_;
};

// Two processes with a socket between them.
class TwoProcesses {
 public:
  using Role = std::function<void(const Socket& other)>;

  TwoProcesses(const Environment& environment, const Role& one, const Role& other) {
    std::array<int, 2> sockets{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()) != 0) {
      throw std::runtime_error("no sockets");
    }
    const auto start = [&](size_t index, const Role& role) {
      return std::make_unique<Process>(environment, [&sockets, index, &role] {
        close(sockets[1 - index]); // then this process sees the end of the other one
        haveTheDriver();
        role(Socket(sockets[index]));
      });
    };
    first = start(0, one);
    second = start(1, other);
    for (const int socket : sockets) {
      close(socket);
    }
  }

  bool haveSucceeded() {
    EXPECT_TRUE(first->hasSucceeded()) << first->written();
    EXPECT_TRUE(second->hasSucceeded()) << second->written();
    return first->hasSucceeded() && second->hasSucceeded();
  }
  uint64_t count(const std::string& name) {
    return first->count(name) + second->count(name);
  }

  std::unique_ptr<Process> first;
  std::unique_ptr<Process> second;
};

// With these functions of the driver UCX copies, waits for the device, and shares memory.
inline constexpr std::array<const char*, 7> kCounted{
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamSynchronize",
    "cuEventQuery",
    "cuEventRecord",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2"};

// Runs an action, and writes how often it called the driver and how long threads waited in the driver.
template <typename Action>
void counted(const Action& action) {
  std::map<std::string, uint64_t> before;
  for (const char* function : kCounted) {
    before[function] = cudaStubCalls(function);
  }
  const uint64_t blockedBefore = cudaStubBlockedUs();
  action();
  for (const char* function : kCounted) {
    std::cout << function << "=" << cudaStubCalls(function) - before[function] << std::endl;
  }
  std::cout << "blocked_us=" << cudaStubBlockedUs() - blockedBefore << std::endl;
}

} // namespace torch_ucx_rpc
