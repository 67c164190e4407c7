#pragma once

#include "peers/process_watch.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace torch_ucx_rpc {

// Notices within milliseconds that the process of a peer on another host has probably ended. UCX notices it over TCP,
// but not over InfiniBand and RoCE, where retries to a killed process went on for 11 s.
//
// A lifeline is a TCP connection to a port that the peer's process listens on and never accepts from
// (_bootstrap/lifeline.py). The peer's kernel ends the connection when the process ends. Nothing is sent. Thread-safe.
class Lifelines {
 public:
  using Watch = ProcessWatch::Watch;

  explicit Lifelines(Watch watch) : watch_(std::move(watch)) {}
  ~Lifelines();
  Lifelines(const Lifelines&) = delete;
  Lifelines& operator=(const Lifelines&) = delete;

  // Connects to the port of `member`, unless it has none or this object is connected to it. `onCut` runs once, inside
  // the watch, when the connection has ended and the port refuses another one. It never runs if the port could not be
  // reached at first: a firewall or an address of another network says nothing about the peer. With `hasFailed`,
  // another connection to the peer has ended: then `onCut` runs also if the port refuses the first one.
  void connect(const Member& member, UniqueFunction<void()> onCut, bool hasFailed = false);

  // Closes the connection. `onCut` may be running already, or about to.
  void forget(const Member& member);

 private:
  // A firewall may end a connection for its own reasons. If another process listens at the address, it may do so each
  // time.
  static constexpr int kReconnections = 3;

  struct Line {
    int socket = -1;
    std::string host;
    uint16_t port = 0;
    bool hasConnected = false; // the lifeline was connected before this attempt
    int reconnectionsLeft = kReconnections;
    UniqueFunction<void()> onCut;
  };

  // Begins to connect, and returns the socket; -1 where that is not possible.
  static int beginToConnect(const Line& line);
  // Begins to connect, and watches the connection. False where one of the two is not possible.
  bool open(uint64_t session, Line& line);
  void onEvent(uint64_t session);

  Watch watch_;
  std::mutex mutex_;
  std::map<uint64_t, Line> lines_; // by session; guarded by mutex_
};

} // namespace torch_ucx_rpc
