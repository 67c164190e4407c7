#include "base/proc.h"

#include "eventually.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>

namespace torch_ucx_rpc {
namespace {

std::string directoryOf(pid_t thread) {
  return "/proc/self/task/" + std::to_string(thread);
}

TEST(ProcTest, MissingFileGivesNothingAndSetsErrno) {
  EXPECT_EQ(readProcFile("/proc/self/no such file"), std::nullopt);
  EXPECT_EQ(errno, ENOENT);
  EXPECT_EQ(readProcStat("/proc/self/task/1000000000"), std::nullopt);
}

TEST(ProcTest, AThreadThatReadsFromAPipeIsInASystemCall) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  std::atomic<pid_t> id{0};
  std::thread reader([&] {
    id.store(gettid());
    char byte = 0;
    EXPECT_EQ(read(pipes[0], &byte, 1), 1);
  });
  EXPECT_TRUE(eventually([&] { return id.load() != 0 && isInSystemCall(directoryOf(id.load())); }));
  EXPECT_EQ(write(pipes[1], "x", 1), 1);
  reader.join();
  close(pipes[0]);
  close(pipes[1]);
}

TEST(ProcTest, AThreadThatRunsIsInNoSystemCall) {
  std::atomic<pid_t> id{0};
  std::atomic<bool> isOver{false};
  std::thread runner([&] {
    id.store(gettid());
    while (!isOver.load()) {
    }
  });
  EXPECT_TRUE(eventually([&] { return id.load() != 0; }));
  EXPECT_FALSE(isInSystemCall(directoryOf(id.load())));
  isOver.store(true);
  runner.join();
}

// The thread sleeps in state S, in the middle of a write to memory.
TEST(ProcTest, AThreadInAPageFaultIsInNoSystemCall) {
  const int faults = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
  if (faults < 0) {
    GTEST_SKIP() << "userfaultfd needs CAP_SYS_PTRACE here";
  }
  const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  uffdio_api api{};
  api.api = UFFD_API;
  ASSERT_EQ(ioctl(faults, UFFDIO_API, &api), 0);
  uffdio_register watched{};
  watched.range = {reinterpret_cast<uintptr_t>(page), bytes};
  watched.mode = UFFDIO_REGISTER_MODE_MISSING;
  ASSERT_EQ(ioctl(faults, UFFDIO_REGISTER, &watched), 0);

  std::atomic<pid_t> id{0};
  std::thread writer([&] {
    id.store(gettid());
    *static_cast<volatile char*>(page) = 1;
  });
  EXPECT_TRUE(eventually([&] {
    const auto stat = id.load() != 0 ? readProcStat(directoryOf(id.load())) : std::nullopt;
    return stat && stat->state == 'S';
  }));
  EXPECT_FALSE(isInSystemCall(directoryOf(id.load())));
  uffdio_zeropage filled{};
  filled.range = watched.range;
  EXPECT_EQ(ioctl(faults, UFFDIO_ZEROPAGE, &filled), 0);
  writer.join();
  munmap(page, bytes);
  close(faults);
}

} // namespace
} // namespace torch_ucx_rpc
