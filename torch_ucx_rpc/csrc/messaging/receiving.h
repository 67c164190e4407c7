#pragma once

#include "messaging/device_allocation.h"
#include "messaging/message.h"
#include "transport/transport.h"
#include "wire/assembler.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

namespace torch_ucx_rpc {

class Connection;

// A rendezvous that has not been received yet. If it has a number and its endpoint fails, the peer announces it again
// over another endpoint. The number stays the same. Connection::Incoming::announced has the announcement.
struct Announcement {
  Connection* from;
  uint64_t key; // in the map
  void* rendezvous; // the transport's handle; null while the transport receives it, and until it is announced again
  bool isNumbered;
  bool isBeingReceived = false;
  uint16_t endpoint = 0; // the peer's endpoint over which it came: wire::Header::endpoint
  uint16_t endpointAgain = 0; // the peer's endpoint over which `again` came
  void* again = nullptr; // a later announcement; used if `rendezvous` fails
  const void* origin = nullptr; // Transport::originOf() the rendezvous that is being received
};
// Each announced piece has one. A few more bytes would put it in another size class of malloc. That would cost a worker
// with large answers tens of MiB of fragmented memory.
static_assert(sizeof(Announcement) == 48);

// A message that the Receiver receives into memory. It waits in Connection::Incoming::starting until it has memory and
// earlier work on that memory is done. Then its pieces move from `assembled` to `parts`.
struct Receiving {
  // If devices are in use, a body that comes by rendezvous is received first, since it says where the spans go. The
  // transport must not get device memory on only one side of a transfer.
  enum class Stage : uint8_t {
    kBody, // the body alone is received
    kMemory, // the spans get memory, and so does a body that has not been received
    kSpans, // the spans are received into that memory
  };
  // The part that one operation receives: a piece of a span, or the body.
  struct Part {
    Announcement* announcement;
    void* into;
    uint64_t bytes;
    Memory memory;
  };
  using Entry = std::list<Receiving>::iterator; // stays valid until the last part is done

  IncomingMessage message;
  uint64_t bytes = 0;
  uint64_t deviceBytes = 0;
  std::chrono::steady_clock::time_point began;
  wire::Assembled assembled;
  std::vector<c10::DataPtr> into; // memory that is given for spans, by their index
  Stage stage = Stage::kMemory;
  bool isPlanned = false; // memory for this stage has been allocated, or is being allocated
  std::shared_ptr<DeviceAllocation> allocation; // until it is done
  DeviceWork pendingWork; // earlier work of devices on its memory
  std::vector<Part> parts;
  size_t begun = 0; // parts whose receive has begun
  size_t unfinished = 0; // parts that have begun and are not done
  bool isDropped = false; // its peer is gone
  Error error;
};

} // namespace torch_ucx_rpc
