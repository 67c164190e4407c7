#pragma once

#include "base/error.h"
#include "base/unique_function.h"
#include "wire/header.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

// The seam between what the agent wants to say and how it travels. Two implementations: ucp/ (UCX active messages) and
// loopback/ (in-process, with faults on demand, for tests). The contract below is written out as tests, once, in
// tests/cpp/transport_contract_test.cpp, and both implementations run them.
//
// Threads: a transport is single-threaded. The caller holds the worker lock for every method except address(), eventFd(),
// description() and canShare(). All callbacks run inside a method call, hence under that lock: they must not block, take the GIL, run user
// code, or call progress().

namespace torch_ucx_rpc {

using EndpointId = uint32_t;

// Outcome of one send or receive; called exactly once, inside send()/receive() itself or inside a later progress().
using OperationDone = UniqueFunction<void(Error)>;

enum class SendMode : uint8_t {
  kEager, // travels with its header; the receiver gets the bytes at once
  kRendezvous, // only the header travels; the bytes wait here until the receiver takes or refuses them
};

// Where the bytes of a rendezvous lie.
enum class Memory : uint8_t {
  kHost,
  kDevice, // of any device; the transport finds out which
};

// What a transport tells its owner. Whoever has no memory for a message throws std::bad_alloc out of the first two: an eager
// message is dropped then, a rendezvous refused.
class TransportListener {
 public:
  virtual ~TransportListener() = default;

  // An active message arrived. Eager bytes are valid during the call only.
  virtual void onEager(std::span<const std::byte> header, std::span<const std::byte> bytes) = 0;

  // A rendezvous was announced: hand `parked` to receive() or refuse(), once, whenever it suits.
  virtual void onParked(std::span<const std::byte> header, void* parked, uint64_t bytes) = 0;

  // The endpoint is dead: its operations complete with errors (now or in a later progress()), and so will new ones.
  virtual void onEndpointFailed(EndpointId endpoint, const Error& error) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual void setListener(TransportListener* listener) = 0;

  // What a peer's connect() needs to reach this worker. Opaque bytes.
  virtual const std::string& address() const = 0;

  // Readable, edge by edge, when progress() has something to do after arm() returned true.
  virtual int eventFd() const = 0;

  // For people: version and path of the library, say. Key -> value.
  virtual std::vector<std::pair<std::string, std::string>> description() const = 0;

  // Makes an endpoint; whether the peer can be reached shows later. Fails for an address that makes no sense, and where the process
  // may open no more files.
  virtual Error connect(const std::string& address, EndpointId& endpoint) = 0;

  // Sends one active message. Header and bytes must stay valid until `done`. Only a rendezvous may be in device memory.
  virtual void send(
      EndpointId endpoint,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory memory = Memory::kHost) = 0;

  // Receives a parked message into `into`, which holds as many bytes as onParked announced and stays valid until `done`.
  virtual void receive(void* parked, void* into, uint64_t bytes, OperationDone done, Memory memory = Memory::kHost) = 0;

  // Whether what is in this memory of a device can go straight from there to other workers of this machine. For any thread.
  virtual bool canShare(const void* deviceMemory) const = 0;

  // Gives a parked message up; the sender's operation completes.
  virtual void refuse(void* parked) = 0;

  // Does what can be done without blocking; returns how many things it did. 0: nothing to do now.
  virtual unsigned progress() = 0;

  // Prepares for sleep. False: something happened meanwhile, call progress() first. True: the event fd will tell.
  virtual bool arm() = 0;

  // Sends and receives that have not completed.
  virtual size_t operationsInFlight() const = 0;

  // Ways the transport chose for this endpoint, e.g. "sysv/memory", "tcp/eth0".
  virtual std::vector<std::string> lanes(EndpointId endpoint) const = 0;

  // To be called after a process of this machine has died, and again every few milliseconds until it returns true: nothing that it
  // has left unfinished keeps messages of others from arriving.
  virtual bool repair() = 0;

  // Abandons one endpoint: its operations complete, with an error unless the peer has taken them before that. Where a network is
  // in between, not before what has been begun has left this machine or the network has given up, which may take minutes.
  virtual void abandon(EndpointId endpoint) = 0;

  // Flushes what was sent eagerly, then ends everything; what is not done after `limitMs` is abandoned. Nothing may be called
  // afterwards but the destructor. Parked messages that nobody took are refused.
  virtual void close(int64_t limitMs) = 0;
};

} // namespace torch_ucx_rpc
