#include "transport/ucp/ucp_transport.h"

#include "transport/ucp/device_sharing.h"
#include "transport/ucp/queue_repair.h"
#include "transport/ucp/ucp_library.h"
#include "transport/ucp/worker_address.h"

#include <poll.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

constexpr unsigned kMessageId = 0; // the one active-message id we use
constexpr unsigned kMaxLanes = 16; // UCP_MAX_LANES of UCX 1.22

// UCX asks the device's driver about an address, unless told that it is the host's.
ucs_memory_type_t memoryTypeOf(Memory memory) {
  return memory == Memory::kHost ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_UNKNOWN;
}

Error abandoned() {
  return {ErrorCode::kCanceled, "the endpoint was abandoned"};
}

class UcpTransport final : public Transport {
 public:
  UcpTransport(size_t expectedPeers, const std::string& networkDevices);
  ~UcpTransport() override;

  void setListener(TransportListener* listener) override {
    listener_ = listener;
  }
  const std::string& address() const override {
    return address_;
  }
  int eventFd() const override {
    return eventFd_;
  }
  std::vector<std::pair<std::string, std::string>> description() const override;
  Error connect(const std::string& address, EndpointId& endpoint) override;
  void send(
      EndpointId endpoint,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory memory) override;
  void receive(void* parked, void* into, uint64_t bytes, OperationDone done, Memory memory) override;
  bool canShare(const void* deviceMemory) const override {
    return canShareDeviceMemory(deviceMemory);
  }
  void refuse(void* parked) override;
  unsigned progress() override;
  bool arm() override;
  size_t operationsInFlight() const override {
    return operationsInFlight_;
  }
  std::vector<std::string> lanes(EndpointId endpoint) const override;
  bool repair() override {
    return repair_->run();
  }
  void abandon(EndpointId endpoint) override;
  void close(int64_t limitMs) override;

 private:
  struct Endpoint {
    UcpTransport* transport;
    EndpointId id;
    ucp_ep_h handle = nullptr; // null once closed
    Error failure; // why it is dead
  };

  // One send or receive that UCX has not completed. UCX owns the buffers until its callback; the list lets close() end
  // operations whose callback UCX never runs.
  struct Operation {
    UcpTransport* transport;
    OperationDone done;
    Operation* previous = nullptr;
    Operation* next = nullptr;
  };

  static ucs_status_t onMessage(
      void* self, const void* header, size_t headerBytes, void* data, size_t bytes, const ucp_am_recv_param_t* param);
  static void onSendDone(void* request, ucs_status_t status, void* operation);
  static void onReceiveDone(void* request, ucs_status_t status, size_t bytes, void* operation);
  static void onEndpointError(void* endpoint, ucp_ep_h handle, ucs_status_t status);

  Operation* begin(OperationDone done);
  // Ends an operation: called with what the UCX call returned, and by the callbacks.
  void settle(Operation* operation, ucs_status_ptr_t returned);
  void finish(Operation* operation, ucs_status_t status);
  bool hasSharedMemory(const Endpoint& endpoint) const;
  void closeWhenDrained(Endpoint& endpoint);
  bool isDraining(const Endpoint& endpoint) const;
  void closeHandle(Endpoint& endpoint);
  void destroy();

  TransportListener* listener_ = nullptr;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string address_;
  int eventFd_ = -1;
  std::optional<QueueRepair> repair_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::vector<Endpoint*> failed_; // to be closed outside of UCX's callbacks
  // Flushes of abandoned endpoints, to be closed then.
  std::vector<std::pair<Endpoint*, ucs_status_ptr_t>> draining_;
  std::vector<ucs_status_ptr_t> closing_;
  std::unordered_set<void*> parked_;
  Operation* operations_ = nullptr;
  size_t operationsInFlight_ = 0;
};

UcpTransport::UcpTransport(size_t expectedPeers, const std::string& networkDevices) {
  context_ = startUcx(expectedPeers, networkDevices);
  try {
    ucp_worker_params_t workerParams{};
    workerParams.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    workerParams.thread_mode = UCS_THREAD_MODE_SERIALIZED; // the worker lock serializes
    const std::set<uintptr_t> othersQueues = SharedMemoryQueue::mapped();
    check(ucp_worker_create(context_, &workerParams, &worker_), "creating a UCX worker");
    repair_.emplace(SharedMemoryQueue::mappedSince(othersQueues));

    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
        UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    handler.id = kMessageId;
    handler.cb = &UcpTransport::onMessage;
    handler.arg = this;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    check(ucp_worker_set_am_recv_handler(worker_, &handler), "registering the UCX message handler");
    check(ucp_worker_get_efd(worker_, &eventFd_), "getting UCX's event descriptor");

    ucp_address_t* address = nullptr;
    size_t addressBytes = 0;
    check(ucp_worker_get_address(worker_, &address, &addressBytes), "getting UCX's worker address");
    address_ = sealAddress({reinterpret_cast<const char*>(address), addressBytes});
    ucp_worker_release_address(worker_, address);
  } catch (...) {
    destroy();
    throw;
  }
}

UcpTransport::~UcpTransport() {
  close(0);
}

void UcpTransport::destroy() {
  // Without both calls UCX complains at exit that its "async handler table is not empty".
  if (worker_ != nullptr) {
    ucp_worker_destroy(std::exchange(worker_, nullptr));
  }
  if (context_ != nullptr) {
    ucp_cleanup(std::exchange(context_, nullptr));
  }
}

std::vector<std::pair<std::string, std::string>> UcpTransport::description() const {
  const UcpLibrary library = loadedUcpLibrary();
  return {{"ucx.version", library.version}, {"ucx.path", library.path}};
}

Error UcpTransport::connect(const std::string& address, EndpointId& endpoint) {
  const std::string_view ucxAddress = openAddress(address);
  if (ucxAddress.empty()) {
    return {ErrorCode::kPeerFailed, "that is not the address of a UCX worker of this package, or it is damaged"};
  }
  if (Error error = filesForAConnection(eventFd_)) {
    return error;
  }
  auto created = std::make_unique<Endpoint>();
  created->transport = this;
  created->id = static_cast<EndpointId>(endpoints_.size());

  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(ucxAddress.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcpTransport::onEndpointError;
  params.err_handler.arg = created.get();
  if (Error error = errorOf(ucp_ep_create(worker_, &params, &created->handle))) {
    return error;
  }
  endpoint = created->id;
  endpoints_.push_back(std::move(created));
  return {};
}

UcpTransport::Operation* UcpTransport::begin(OperationDone done) {
  auto* operation = new Operation{this, std::move(done), nullptr, operations_};
  if (operations_ != nullptr) {
    operations_->previous = operation;
  }
  operations_ = operation;
  ++operationsInFlight_;
  return operation;
}

void UcpTransport::settle(Operation* operation, ucs_status_ptr_t returned) {
  if (returned == nullptr) {
    finish(operation, UCS_OK);
  } else if (UCS_PTR_IS_ERR(returned)) {
    finish(operation, UCS_PTR_STATUS(returned));
  } // else the callback will
}

void UcpTransport::finish(Operation* operation, ucs_status_t status) {
  (operation->previous != nullptr ? operation->previous->next : operations_) = operation->next;
  if (operation->next != nullptr) {
    operation->next->previous = operation->previous;
  }
  --operationsInFlight_;
  OperationDone done = std::move(operation->done);
  delete operation;
  done(errorOf(status));
}

void UcpTransport::send(
    EndpointId endpointId,
    const wire::Header& header,
    std::span<const std::byte> bytes,
    SendMode mode,
    OperationDone done,
    Memory memory) {
  const Endpoint& endpoint = *endpoints_[endpointId];
  if (endpoint.failure) {
    done(endpoint.failure);
    return;
  }
  Operation* operation = begin(std::move(done));
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
      UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &UcpTransport::onSendDone;
  param.user_data = operation;
  // Which protocol suits is decided by the agent, once, for all lanes: UCX's own threshold differs from lane to lane.
  param.flags = mode == SendMode::kEager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  param.memory_type = memoryTypeOf(memory);
  settle(
      operation,
      ucp_am_send_nbx(endpoint.handle, kMessageId, &header, sizeof(header), bytes.data(), bytes.size(), &param));
}

void UcpTransport::receive(void* parked, void* into, uint64_t bytes, OperationDone done, Memory memory) {
  parked_.erase(parked);
  Operation* operation = begin(std::move(done));
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &UcpTransport::onReceiveDone;
  param.user_data = operation;
  param.memory_type = memoryTypeOf(memory);
  settle(operation, ucp_am_recv_data_nbx(worker_, parked, into, bytes, &param));
}

void UcpTransport::refuse(void* parked) {
  if (parked_.erase(parked) != 0) { // else UCX has it back: there was no memory for it, see onMessage()
    ucp_am_data_release(worker_, parked);
  }
}

ucs_status_t UcpTransport::onMessage(
    void* self, const void* header, size_t headerBytes, void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  auto* transport = static_cast<UcpTransport*>(self);
  const std::span<const std::byte> headerSpan(static_cast<const std::byte*>(header), headerBytes);
  const bool isParked = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  try { // no exception may pass through UCX
    if (isParked) {
      transport->parked_.insert(data);
      transport->listener_->onParked(headerSpan, data, bytes);
      return UCS_INPROGRESS; // we keep the descriptor
    }
    transport->listener_->onEager(headerSpan, {static_cast<const std::byte*>(data), bytes});
  } catch (const std::bad_alloc&) {
    transport->parked_.erase(data);
    return isParked ? UCS_ERR_NO_MEMORY : UCS_OK;
  }
  return UCS_OK;
}

void UcpTransport::onSendDone(void* request, ucs_status_t status, void* operation) {
  ucp_request_free(request);
  auto* done = static_cast<Operation*>(operation);
  done->transport->finish(done, status);
}

void UcpTransport::onReceiveDone(void* request, ucs_status_t status, size_t /*bytes*/, void* operation) {
  onSendDone(request, status, operation);
}

void UcpTransport::onEndpointError(void* endpoint, ucp_ep_h /*handle*/, ucs_status_t status) {
  auto* failed = static_cast<Endpoint*>(endpoint);
  if (failed->failure) {
    return; // we gave it up ourselves
  }
  failed->failure = {ErrorCode::kPeerFailed, std::string("UCX: ") + ucs_status_string(status)};
  failed->transport->failed_.push_back(failed);
  failed->transport->listener_->onEndpointFailed(failed->id, failed->failure);
}

bool UcpTransport::hasSharedMemory(const Endpoint& endpoint) const {
  const std::vector<std::string> lanes = this->lanes(endpoint.id);
  return std::any_of(lanes.begin(), lanes.end(), [](const std::string& lane) { return lane.ends_with("/memory"); });
}

// UCX ends the process in two cases (1.22, and master in August 2026), in each because it uses what has been freed:
// - Both sides close a TCP connection while this one still has bytes for it, after a cut for instance. One event may be that the socket is
//   writable and that the other side's farewell is there, which frees what is then written from (uct_tcp_iface_handle_events()). So there must
//   be no such bytes; a flush that completes at once says so.
// - An endpoint is closed while it is being flushed (ucp_ep_flush_resume_slow_path_callback()).
void UcpTransport::closeWhenDrained(Endpoint& endpoint) {
  const ucp_request_param_t param{};
  const ucs_status_ptr_t flush = ucp_ep_flush_nbx(endpoint.handle, &param);
  if (UCS_PTR_IS_PTR(flush)) {
    draining_.emplace_back(&endpoint, flush);
  } else {
    closeHandle(endpoint);
  }
}

bool UcpTransport::isDraining(const Endpoint& endpoint) const {
  return std::any_of(draining_.begin(), draining_.end(), [&](const auto& item) { return item.first == &endpoint; });
}

void UcpTransport::closeHandle(Endpoint& endpoint) {
  if (endpoint.handle == nullptr) {
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(endpoint.handle, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) {
    closing_.push_back(request);
  }
}

unsigned UcpTransport::progress() {
  const unsigned events = ucp_worker_progress(worker_);
  for (Endpoint* endpoint : std::exchange(failed_, {})) {
    if (!isDraining(*endpoint)) {
      closeHandle(*endpoint);
    }
  }
  std::vector<Endpoint*> drained;
  std::erase_if(draining_, [&](const auto& item) {
    const auto [endpoint, flush] = item;
    const ucs_status_t status = ucp_request_check_status(flush);
    if (status == UCS_INPROGRESS) {
      return false;
    }
    ucp_request_free(flush);
    if (status == UCS_OK) {
      drained.push_back(endpoint);
    } else {
      closeHandle(*endpoint); // the connection has failed
    }
    return true;
  });
  for (Endpoint* endpoint : drained) {
    closeWhenDrained(*endpoint); // something may have been begun since
  }
  std::erase_if(closing_, [](ucs_status_ptr_t request) {
    const bool isDone = ucp_request_check_status(request) != UCS_INPROGRESS;
    if (isDone) {
      ucp_request_free(request);
    }
    return isDone;
  });
  return events;
}

bool UcpTransport::arm() {
  return ucp_worker_arm(worker_) != UCS_ERR_BUSY;
}

std::vector<std::string> UcpTransport::lanes(EndpointId endpointId) const {
  const Endpoint& endpoint = *endpoints_[endpointId];
  if (endpoint.handle == nullptr) {
    return {};
  }
  ucp_transport_entry_t entries[kMaxLanes];
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries;
  attributes.transports.num_entries = kMaxLanes;
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (ucp_ep_query(endpoint.handle, &attributes) != UCS_OK) {
    return {};
  }
  std::vector<std::string> lanes;
  for (unsigned lane = 0; lane < attributes.transports.num_entries; ++lane) {
    std::string name = std::string(entries[lane].transport_name) + "/" + entries[lane].device_name;
    if (std::find(lanes.begin(), lanes.end(), name) == lanes.end()) {
      lanes.push_back(std::move(name));
    }
  }
  return lanes;
}

void UcpTransport::abandon(EndpointId endpointId) {
  Endpoint& endpoint = *endpoints_[endpointId];
  if (endpoint.failure) {
    return;
  }
  endpoint.failure = abandoned();
  if (hasSharedMemory(endpoint)) {
    closeHandle(endpoint); // it may never be drained: nobody empties the queue of a process that has ended
  } else {
    closeWhenDrained(endpoint);
  }
}

void UcpTransport::close(int64_t limitMs) {
  if (worker_ == nullptr) {
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(limitMs);
  const auto refuseParked = [this] {
    for (void* parked : std::exchange(parked_, {})) {
      ucp_am_data_release(worker_, parked);
    }
  };
  refuseParked();

  for (const auto& endpoint : endpoints_) {
    if (endpoint->handle != nullptr && !endpoint->failure) {
      endpoint->failure = abandoned();
      closeWhenDrained(*endpoint);
    }
  }
  while (!draining_.empty() && Clock::now() < deadline) {
    if (progress() == 0 && arm()) {
      pollfd event{eventFd_, POLLIN, 0};
      (void)poll(&event, 1, 1);
    }
  }
  refuseParked(); // what came meanwhile

  // What is closed by force needs no answer from the peers, only progress; the bound is for what UCX leaves behind. What cannot be drained
  // ends with the worker.
  const auto forcedDeadline = Clock::now() + std::chrono::milliseconds(500);
  while ((!closing_.empty() || (draining_.empty() && operationsInFlight_ != 0)) && Clock::now() < forcedDeadline) {
    progress();
  }
  for (const auto& [endpoint, flush] : std::exchange(draining_, {})) {
    ucp_request_free(flush);
  }
  destroy(); // may still run callbacks: operations must exist until here
  while (operations_ != nullptr) {
    finish(operations_, UCS_ERR_CANCELED);
  }
}

} // namespace

std::unique_ptr<Transport> makeUcpTransport(size_t expectedPeers, const std::string& networkDevices) {
  return std::make_unique<UcpTransport>(expectedPeers, networkDevices);
}

} // namespace torch_ucx_rpc
