#include "peers/lifelines.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <utility>

namespace torch_ucx_rpc {

namespace {

// Returns the errno that says why a connection has ended or was not made. 0: the other side has closed it normally.
int whyEnded(int socket) {
  char byte = 0;
  return recv(socket, &byte, sizeof(byte), MSG_DONTWAIT) < 0 ? errno : 0;
}

} // namespace

Lifelines::~Lifelines() {
  for (const auto& [session, line] : lines_) {
    ::close(line.socket);
  }
}

int Lifelines::beginToConnect(const Line& line) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV; // no lookup, which could block
  addrinfo* found = nullptr;
  if (getaddrinfo(line.host.c_str(), std::to_string(line.port).c_str(), &hints, &found) != 0) {
    return -1;
  }
  int socket = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket >= 0 && ::connect(socket, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) {
    ::close(std::exchange(socket, -1));
  }
  freeaddrinfo(found);
  return socket;
}

void Lifelines::connect(const Member& member, UniqueFunction<void()> onCut, bool hasFailed) {
  if (member.lifelinePort == 0) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto [entry, isNew] = lines_.try_emplace(member.session);
  Line& line = entry->second;
  if (!isNew) {
    return;
  }
  line.host = member.lifelineHost;
  line.port = member.lifelinePort;
  line.onCut = std::move(onCut);
  line.hasConnected = hasFailed;
  if (!open(member.session, line)) {
    lines_.erase(entry);
  }
}

bool Lifelines::open(uint64_t session, Line& line) {
  line.socket = beginToConnect(line);
  if (line.socket < 0) {
    return false;
  }
  try {
    watch_(line.socket, [this, session] { onEvent(session); });
  } catch (const std::exception&) {
    // The kernel gives this user no more watches. The heartbeat goes on without the lifeline.
    ::close(std::exchange(line.socket, -1));
    return false;
  }
  return true;
}

// The meaning of events on a lifeline:
//
//   how the socket has ended                what it means                      what follows
//   a connection ended (0, ECONNRESET)      its process ended, or a firewall   another connection, kReconnections times
//                                           cut the connection
//   refused, and it was connected before    no process listens there           onCut
//   refused at first, or not reached        nothing about the peer             nothing, unless another connection has
//                                                                              failed: then onCut, if it is refused
void Lifelines::onEvent(uint64_t session) {
  UniqueFunction<void()> onCut;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = lines_.find(session);
    if (entry == lines_.end()) {
      return; // forgotten in between
    }
    Line& line = entry->second;
    const int why = whyEnded(line.socket);
    ::close(std::exchange(line.socket, -1));
    const bool wasConnected = why == 0 || why == ECONNRESET;
    if (wasConnected && line.reconnectionsLeft-- > 0) {
      line.hasConnected = true;
      if (open(session, line)) {
        return;
      }
    }
    if (line.hasConnected && why == ECONNREFUSED) {
      onCut = std::move(line.onCut);
    }
    lines_.erase(entry);
  }
  if (onCut) {
    onCut();
  }
}

void Lifelines::forget(const Member& member) {
  const std::lock_guard lock(mutex_);
  const auto entry = lines_.find(member.session);
  if (entry != lines_.end()) {
    ::close(entry->second.socket); // also takes it out of every epoll set
    lines_.erase(entry);
  }
}

} // namespace torch_ucx_rpc
