#include "transport/ucp/files_for_ucx.h"

#include "base/file_reserve.h"
#include "base/imports.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <ucs/type/status.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace torch_ucx_rpc {

namespace {

bool isLackOfFiles(int error) {
  return error == EMFILE || error == ENFILE;
}

// Whether the listening socket itself is useless. Other errors concern one connection, or are temporary (accept(2)).
bool isOfTheListener(int error) {
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EFAULT;
}

// Never destroyed: UCX's threads may use it until the process ends.
struct Reserve {
  std::mutex mutex;
  FileReserve files; // guarded by mutex, as all below
  int users = 0;
};

Reserve& reserve() {
  static auto* const only = new Reserve();
  return *only;
}

// During a cut of the network, TCP doubles the wait before each further attempt. So the first answer may come as long
// after the cut's end as the cut lasted. A bound of a second on the wait prevents that. With the bound, the usual 15
// attempts would be over too soon. So this function also sets the time that they take by default. Accepted sockets
// inherit both. Kernels before 6.15 have no such bound.
void boundResending(int domain, int type, int socket) {
#ifndef TCP_RTO_MAX_MS
  constexpr int TCP_RTO_MAX_MS = 44;
#endif
  constexpr int kLongestWaitMs = 1000;
  constexpr int kGivenUpAfterMs = 924'000;
  const bool isTcp = (domain == AF_INET || domain == AF_INET6) && (type & SOCK_STREAM) != 0;
  if (isTcp && setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, &kLongestWaitMs, sizeof(kLongestWaitMs)) == 0) {
    (void)setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kGivenUpAfterMs, sizeof(kGivenUpAfterMs));
  }
}

int socketForUcx(int domain, int type, int protocol) {
  Reserve& reserve = torch_ucx_rpc::reserve();
  const std::lock_guard lock(reserve.mutex);
  int socket = ::socket(domain, type, protocol);
  if (socket < 0 && isLackOfFiles(errno)) {
    reserve.files.release();
    socket = ::socket(domain, type, protocol);
  }
  const int error = errno;
  if (socket >= 0) {
    boundResending(domain, type, socket);
  }
  if (reserve.users > 0) {
    reserve.files.refill();
  }
  errno = error;
  return socket;
}

// True on the thread that accepts connections, while a connection has to wait for a file.
thread_local bool isConnectionWaiting = false;
constexpr timespec kPause{.tv_sec = 0, .tv_nsec = 1'000'000};

// UCX takes EAGAIN for "no connection", and asks again while a connection waits. The reserve is not for incoming
// connections, since every worker may make one. UCX looks at a network card for each, and needs the reserve for that.
int acceptForUcx(int listener, sockaddr* address, socklen_t* length) {
  const int connection = ::accept(listener, address, length);
  if (connection < 0 && !isOfTheListener(errno)) {
    isConnectionWaiting = isLackOfFiles(errno);
    errno = EAGAIN;
  }
  return connection;
}

// While a connection waits, UCX's thread would ask for it without a pause. Each time it would hold the lock of UCX's
// worker. On a single core no other thread would get that lock, as every thread that wants it spins. The pause is here,
// where the thread has no lock. A thread that only polls holds the lock, and must not pause.
int epollWaitForUcx(int epoll, epoll_event* events, int most, int timeoutMs) {
  if (timeoutMs != 0 && isConnectionWaiting) {
    isConnectionWaiting = false;
    (void)nanosleep(&kPause, nullptr);
  }
  return ::epoll_wait(epoll, events, most, timeoutMs);
}

// Replaces the imports once, for the whole process.
bool replaceImportsOfUcx() {
  static const bool areReplaced = [] {
    std::array<Import, 3> imports = {
        {{"accept", reinterpret_cast<void*>(&acceptForUcx)},
         {"epoll_wait", reinterpret_cast<void*>(&epollWaitForUcx)},
         {"socket", reinterpret_cast<void*>(&socketForUcx)}}};
    return replaceImports(reinterpret_cast<const void*>(&ucs_status_string), imports);
  }();
  return areReplaced;
}

} // namespace

FilesForUcx::FilesForUcx() : isUsed_(replaceImportsOfUcx()) {
  const std::lock_guard lock(reserve().mutex);
  ++reserve().users;
  reserve().files.refill();
}

FilesForUcx::~FilesForUcx() {
  const std::lock_guard lock(reserve().mutex);
  if (--reserve().users == 0) {
    reserve().files.release();
  }
}

} // namespace torch_ucx_rpc
