#pragma once

#include "base/error.h"
#include "base/unique_function.h"
#include "wire/header.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

// The interface between the agent's messages and the way they travel. The implementation in ucp/ sends UCX active
// messages. Tests have other implementations in tests/cpp/support. LoopbackTransport, for instance, stays inside the
// process and makes faults on demand. tests/cpp/transport/transport_contract_test.cpp tests the contract below on it
// and on UCX.
//
// Threads. A transport is single-threaded: the caller holds the worker lock for every method. The exceptions are
// address(), eventFd(), description(), canShare(), deviceMemoryRefusal() and scanForRepair(), which any thread may call
// without it.
//
// Callbacks run inside a method call, hence under the worker lock. They must not block, take the GIL, run user code or
// call progress().
//
// Exceptions. A callback may throw. No exception crosses UCX's C frames, and the transport stays usable:
// - Out of onEager and onRendezvous: the message is lost, see TransportListener.
// - Out of any other callback: progress(), send(), receive() or abandon() throws it in turn. The next progress()
//   reports the remaining events. close() swallows the exception.

namespace torch_ucx_rpc {

using EndpointId = uint32_t;

// Gets the outcome of one send or receive. It is called exactly once, inside send() or receive() itself or inside a
// later progress(), abandon() or close().
using OperationDone = UniqueFunction<void(Error)>;

enum class SendMode : uint8_t {
  kEager, // the bytes travel with the header, and the receiver gets both at once
  kRendezvous, // only the header travels; the bytes wait at the sender until the receiver receives or releases them
};

// Where the bytes of a rendezvous lie.
enum class Memory : uint8_t {
  kHost,
  kDevice, // of any device; the transport finds out which one
};

// Where the repair of a receive queue stands.
enum class RepairState : uint8_t {
  kWhole, // nothing is missing, or nothing can be missing because there is no shared memory
  kUndecided, // a message is missing, and its sender may still be writing it: scan and ask again in some milliseconds
  // A message is missing, and it is unknown whether its sender still writes it. This worker gets nothing more over
  // shared memory until the sender completes it, or ends. Keep asking: the state returns to kWhole then.
  kUnrepairable,
};

// Gets the messages that arrive and the endpoints that fail. The owner of a transport implements it.
//
// onEager and onRendezvous may throw when there is no memory for the message. The transport then drops an eager
// message. It releases a rendezvous, whose handle becomes void: receive() of it ends with kOutOfMemory, and release()
// of it does nothing. So a listener that has stored the handle before it threw stays consistent.
class TransportListener {
 public:
  virtual ~TransportListener() = default;

  // An active message arrived. The header and the bytes are valid during the call only.
  virtual void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) = 0;

  // A rendezvous was announced. The header is valid during the call only. Hand `rendezvous` to receive() or release(),
  // exactly once, after this call.
  virtual void onRendezvous(std::span<const std::byte> header, void* rendezvous, uint64_t bytes) = 0;

  // Called once for an endpoint that is dead. Its operations complete with errors, now or in a later progress(), and
  // new ones will too. The error's code distinguishes a failure of this process from a failure of the peer: see
  // isLocal(). After a local one, connect() may make another endpoint to the same peer.
  virtual void onEndpointFailed(EndpointId endpoint, const Error& error) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Must be called before the first progress(). The listener must outlive the transport or its close().
  virtual void setListener(TransportListener* listener) = 0;

  // Tells a peer's connect() how to reach this worker. Opaque bytes, constant.
  virtual const std::string& address() const = 0;

  // Becomes readable (edge-triggered) when progress() has something to do after arm() returned true. The transport owns
  // the descriptor.
  virtual int eventFd() const = 0;

  // Facts for people, key and value: version and path of the library, for instance.
  virtual std::vector<std::pair<std::string, std::string>> description() const = 0;

  // Makes an endpoint. Whether the peer can be reached shows later. Fails with kPeerFailed for an address that makes no
  // sense. Fails with a local error if this process lacks a resource.
  virtual Error connect(const std::string& address, EndpointId& endpoint) = 0;

  // Like connect(), but reaches the peer over network transports only, never over shared memory. Both sides must make
  // the same choice. This is for peers of the same machine
  // - in another pid namespace: UCX looks for the peer's process by its id in its own namespace, so shared memory fails
  //   or watches a stranger. Containers with a common IPC namespace have this fault (`--ipc=host` without
  //   `--pid=host`);
  // - of another user, whose shared memory this worker cannot open.
  virtual Error connectOverNetwork(const std::string& address, EndpointId& endpoint) {
    return connect(address, endpoint);
  }

  // Sends one active message. Copies the header, since a message may leave again over another endpoint before `done`.
  // The bytes must stay valid until `done`. Only a rendezvous may be in device memory, and only where
  // deviceMemoryRefusal() allows it.
  virtual void send(
      EndpointId endpoint,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory memory = Memory::kHost) = 0;

  // Receives a rendezvous into `into`, which must hold as many bytes as onRendezvous announced and stay valid until
  // `done`.
  virtual void receive(
      void* rendezvous, void* into, uint64_t bytes, OperationDone done, Memory memory = Memory::kHost) = 0;

  // True if these bytes of a device can travel to another worker of this machine without passing through host memory.
  // Any thread.
  virtual bool canShare(const void* deviceMemory, uint64_t bytes) const = 0;

  // Why send() and receive() fail for Memory::kDevice, as a sentence for the user. No error if they do not fail.
  // Constant. Any thread.
  virtual const Error& deviceMemoryRefusal() const {
    static const Error none;
    return none;
  }

  // Gives up a rendezvous; the sender's operation completes.
  virtual void release(void* rendezvous) = 0;

  // Returns this side's end of the connection over which a rendezvous was announced. The rendezvous must be neither
  // received nor released.
  virtual const void* originOf(void* rendezvous) const = 0;

  // Closes the origin of a rendezvous that is being received. The receive ends with an error, now or in a later
  // progress(). If bytes to the peer wait there, the origin stays open, and the caller tries again later. Returns
  // false, and does nothing, if the origin is a living endpoint that connect() has made: abandon() closes that one.
  virtual bool closeOrigin(const void* origin) = 0;

  // Does all work that does not block, and returns how many steps that took. 0: there is nothing to do now.
  virtual unsigned progress() = 0;

  // Prepares for sleep. False: something has happened, or waits for room at a peer; call progress() first. True:
  // eventFd() will become readable.
  virtual bool arm() = 0;

  // Sends and receives that have not completed, over all endpoints.
  virtual size_t operationsInFlight() const = 0;

  // The ways that the transport chose for this endpoint, "sysv/memory" and "tcp/eth0" for instance.
  virtual std::vector<std::string> lanes(EndpointId endpoint) const = 0;

  // Repair. A process of this machine that dies while it writes into this worker's shared memory leaves a gap there.
  // Nothing behind the gap arrives, from any sender. After a process has died, and whenever this worker seems to
  // receive nothing, call repairState() under the worker lock. While it returns kUndecided, call scanForRepair() and
  // then repairState() again, every 20 ms or so.
  //
  // repairState() takes microseconds. It closes a gap if the last scan has shown that no process can be writing there
  // any more.
  virtual RepairState repairState() {
    return RepairState::kWhole;
  }
  // Looks at the processes of this machine through /proc. That takes milliseconds, or tens of milliseconds among
  // thousands of processes. So do not call it under the worker lock. It does nothing unless repairState() has asked for
  // a scan. Only one thread at a time may call it. It may be called after close(), but not after destruction.
  virtual void scanForRepair() {}

  // Gives up one endpoint. Its operations complete, with an error unless the peer took them before. Over TCP they
  // complete when the begun data has left this machine, or when the kernel has given up. That may take minutes. Over
  // other transports they complete within a few calls of progress(). If the memory of a rendezvous is also under way to
  // another endpoint, the rendezvous may complete only when that one does: UCX releases the memory once.
  virtual void abandon(EndpointId endpoint) = 0;

  // Flushes all eager messages, then ends everything. Gives up operations that are not done after `limitMs`. Releases
  // untaken rendezvous. Afterwards only the destructor and scanForRepair() may be called.
  virtual void close(int64_t limitMs) = 0;
};

} // namespace torch_ucx_rpc
