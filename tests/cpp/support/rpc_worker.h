#pragma once

// The objects of rpc/ around a Messenger, without the agent that owns them in a program.

#include "rpc/call_client.h"
#include "rpc/device_maps.h"
#include "rpc/group.h"
#include "rpc/orphaned_state.h"
#include "rpc/peer_monitor.h"
#include "rpc/request_server.h"

#include "agent_parts_of.h"
#include "fake_rpc_agent.h"
#include "tensors/self_copy.h"
#include "test_worker.h"
#include "torch_messages.h"

#include <chrono>
#include <functional>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

class RpcWorker {
 public:
  // The test adds the members, with Group::addMembers() or Directory::add().
  RpcWorker(
      LoopbackNetwork& network,
      Rank rank,
      Handler handler = &echo,
      const std::function<void()>& whileWaiting = [] {},
      milliseconds heartbeatLimit = milliseconds(0))
      : parts(network, rank, std::vector<Member>{}, handlers, &copyForSelf),
        agent(rank),
        callback(std::move(handler)),
        calls(partsOf(parts), deviceMaps, whileWaiting),
        orphans(partsOf(parts), agent, callback),
        monitor(partsOf(parts), heartbeatLimit),
        requests(partsOf(parts), callback, orphans.holders(), deviceMaps),
        group(partsOf(parts), agent, calls, monitor, orphans, whileWaiting) {
    handlers = {&calls, &requests, &monitor, &group};
    monitor.addObserver(calls);
    monitor.addObserver(parts.messenger);
    monitor.addObserver(orphans);
    monitor.addObserver(group);
  }
  ~RpcWorker() {
    close();
  }
  RpcWorker(const RpcWorker&) = delete;
  RpcWorker& operator=(const RpcWorker&) = delete;

  Future call(Rank to, const std::string& text, MessageType type = MessageType::PYTHON_CALL) {
    return calls.send(parts.peer(to), makeMessage(type, text), milliseconds(0), {});
  }
  Peer& peer(Rank rank) const {
    return parts.peer(rank);
  }
  void close() {
    parts.lifetime.close();
    calls.shutDown();
    parts.close();
  }

  EventHandlers handlers;
  TestWorker parts;
  FakeRpcAgent agent;
  Callback callback;
  DeviceMaps deviceMaps;
  CallClient calls;
  OrphanedState orphans;
  PeerMonitor monitor;
  RequestServer requests;
  Group group;
};

} // namespace torch_ucx_rpc
