// UCX in a process that can open no more files.

#include "transport/ucp/files_for_ucx.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>
#include <ucs/type/status.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {
namespace {

class FilesForUcxTest : public testing::Test {
 protected:
  FilesForUcxTest() {
    EXPECT_TRUE(reserve_->isUsed());
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit_), 0);
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address_), sizeof(address_)), 0);
    EXPECT_EQ(listen(listener_, 64), 0);
    socklen_t length = sizeof(address_);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address_), &length), 0);
  }
  ~FilesForUcxTest() override {
    allowFiles();
    for (const int file : files_) {
      close(file);
    }
    close(listener_);
  }

  void connectOne() {
    files_.push_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(files_.back(), reinterpret_cast<sockaddr*>(&address_), sizeof(address_)), 0);
  }
  // Accepts a connection as UCX does.
  ucs_status_t acceptOne() {
    using Accept = ucs_status_t (*)(int, sockaddr*, socklen_t*, int*);
    static const auto accept = reinterpret_cast<Accept>(dlsym(RTLD_DEFAULT, "ucs_socket_accept"));
    EXPECT_NE(accept, nullptr);
    sockaddr_in from{};
    socklen_t length = sizeof(from);
    int connection = -1;
    const ucs_status_t status = accept(listener_, reinterpret_cast<sockaddr*>(&from), &length, &connection);
    if (status == UCS_OK) {
      EXPECT_EQ(from.sin_family, AF_INET);
      EXPECT_EQ(length, sizeof(from));
      files_.push_back(connection);
    }
    return status;
  }
  // Takes all files, so that none can be opened until allowFiles().
  void openAllFiles() {
    const int next = fcntl(listener_, F_DUPFD, 0);
    close(next);
    const rlimit none{static_cast<rlim_t>(next), limit_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    ASSERT_EQ(fcntl(listener_, F_DUPFD, 0), -1);
  }
  void allowFiles() {
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit_), 0);
  }

  std::optional<FilesForUcx> reserve_{std::in_place};
  rlimit limit_{};
  const int listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_in address_{};
  std::vector<int> files_; // the test closes them at its end
};

TEST_F(FilesForUcxTest, ConnectionsAreAcceptedWhileFilesAreFree) {
  EXPECT_EQ(acceptOne(), UCS_ERR_NO_PROGRESS);
  connectOne();
  EXPECT_EQ(acceptOne(), UCS_OK);
  EXPECT_EQ(acceptOne(), UCS_ERR_NO_PROGRESS);
}

TEST_F(FilesForUcxTest, ConnectionsThatFindNoFileWaitForOne) {
  constexpr int kConnections = 20;
  for (int connection = 0; connection < kConnections; ++connection) {
    connectOne();
  }
  ASSERT_EQ(acceptOne(), UCS_OK);
  openAllFiles();
  for (int time = 0; time < 3; ++time) {
    EXPECT_EQ(acceptOne(), UCS_ERR_NO_PROGRESS) << "UCX would close the port after another error";
  }
  allowFiles();
  for (int connection = 1; connection < kConnections; ++connection) {
    EXPECT_EQ(acceptOne(), UCS_OK);
  }
  EXPECT_EQ(acceptOne(), UCS_ERR_NO_PROGRESS);
}

// Waits for events of the listener, like UCX's thread (ucs/sys/event_set.h).
class WaitingThread {
 public:
  explicit WaitingThread(int file) {
    constexpr uint8_t kRead = 1;
    EXPECT_EQ(function<ucs_status_t(void**)>("ucs_event_set_create")(&events_), UCS_OK);
    EXPECT_EQ(
        function<ucs_status_t(void*, int, uint8_t, void*)>("ucs_event_set_add")(events_, file, kRead, nullptr), UCS_OK);
  }
  ~WaitingThread() {
    function<void(void*)>("ucs_event_set_cleanup")(events_);
  }

  // Returns the time until the thread sees a connection.
  std::chrono::nanoseconds wait(int timeoutMs) {
    using Handler = void (*)(void*, uint8_t, void*);
    const Handler ignore = [](void*, uint8_t, void*) {};
    unsigned count = 1;
    const auto began = std::chrono::steady_clock::now();
    const auto status = function<ucs_status_t(void*, unsigned*, int, Handler, void*)>("ucs_event_set_wait")(
        events_, &count, timeoutMs, ignore, nullptr);
    const auto took = std::chrono::steady_clock::now() - began;
    EXPECT_EQ(status, UCS_OK);
    EXPECT_EQ(count, 1U);
    return took;
  }

 private:
  template <typename Signature>
  static Signature* function(const char* name) {
    void* const found = dlsym(RTLD_DEFAULT, name);
    EXPECT_NE(found, nullptr) << name;
    return reinterpret_cast<Signature*>(found);
  }

  void* events_ = nullptr;
};

TEST_F(FilesForUcxTest, ListenerPausesWhileAConnectionWaitsForAFile) {
  using namespace std::chrono_literals;
  WaitingThread thread(listener_);
  // Returns the shortest of several times, since other processes may take the core.
  const auto shortest = [&](bool accepts, int timeoutMs) {
    auto least = std::chrono::nanoseconds::max();
    for (int time = 0; time < 20; ++time) {
      if (accepts) {
        EXPECT_EQ(acceptOne(), UCS_ERR_NO_PROGRESS);
      }
      least = std::min(least, thread.wait(timeoutMs));
    }
    return least;
  };
  connectOne();
  openAllFiles();
  EXPECT_GE(shortest(true, 1000), 1ms);
  EXPECT_LT(shortest(true, 0), 1ms) << "a thread that only looks has a lock, and does not pause";
  EXPECT_GE(thread.wait(1000), 1ms) << "the next wait pauses";
  EXPECT_LT(shortest(false, 1000), 1ms) << "one pause for each time that there was no file";
}

TEST_F(FilesForUcxTest, UcxCanMakeAndCloseAnyNumberOfSockets) {
  unsigned version[3];
  ucp_get_version(&version[0], &version[1], &version[2]);
  if (version[0] == 1 && version[1] < 22) {
    GTEST_SKIP() << "ucs_socket_create() may take other arguments";
  }
  using Create = ucs_status_t (*)(int, int, int, int*);
  const auto create = reinterpret_cast<Create>(dlsym(RTLD_DEFAULT, "ucs_socket_create"));
  ASSERT_NE(create, nullptr);
  int socket = -1;
  ASSERT_EQ(create(AF_INET, SOCK_STREAM, 0, &socket), UCS_OK);
  close(socket);
  openAllFiles();
  for (int time = 0; time < 100; ++time) {
    ASSERT_EQ(create(AF_INET, SOCK_STREAM, 0, &socket), UCS_OK);
    close(socket);
  }
}

TEST_F(FilesForUcxTest, ReserveIsGivenBackWithTheLastObject) {
  const auto highestFile = [this] {
    const int next = fcntl(listener_, F_DUPFD, 0);
    close(next);
    return next;
  };
  const int withReserve = highestFile();
  std::optional<FilesForUcx> another(std::in_place);
  EXPECT_EQ(highestFile(), withReserve);
  reserve_.reset();
  EXPECT_EQ(highestFile(), withReserve);
  another.reset();
  EXPECT_LT(highestFile(), withReserve);
  connectOne();
  EXPECT_EQ(acceptOne(), UCS_OK) << "UCX goes on without it";
}

TEST_F(FilesForUcxTest, FaultOfTheSocketIsStillAnError) {
  close(listener_);
  EXPECT_NE(acceptOne(), UCS_OK);
  EXPECT_NE(acceptOne(), UCS_ERR_NO_PROGRESS);
  ASSERT_EQ(dup2(STDERR_FILENO, listener_), listener_); // not a socket
  EXPECT_NE(acceptOne(), UCS_ERR_NO_PROGRESS);
}

} // namespace
} // namespace torch_ucx_rpc
