#include "transport/ucp/ucp_transport.h"

#include "base/warnings.h"
#include "transport/ucp/device_sharing.h"
#include "transport/ucp/files_for_ucx.h"
#include "transport/ucp/queue_repair.h"
#include "transport/ucp/ucp_endpoints.h"
#include "transport/ucp/ucp_library.h"
#include "transport/ucp/ucp_operations.h"
#include "transport/ucp/ucp_rendezvous.h"
#include "transport/ucp/ucx_log.h"
#include "transport/ucp/worker_address.h"

#include <poll.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace {

constexpr unsigned kMessageId = 0; // the only active-message id in use
constexpr int kTurnsToCancel = 8; // UCX needs two or three

void warnOfLoss(const std::exception_ptr& loss) {
  try {
    std::rethrow_exception(loss);
  } catch (const std::exception& error) {
    warn(
        std::string("dropped a message that could not be stored (") + error.what() +
        "); further ones are dropped without a warning");
  } catch (...) { // it has no text
  }
}

// UCX believes this type if it is the host's. UCX 1.22 ignores any other type, and looks at the address itself: see
// deviceMemoryMistaken(). So memory of a CUDA device may also be managed memory, which only the driver knows.
ucs_memory_type_t memoryTypeOf(Memory memory) {
  return memory == Memory::kHost ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_CUDA;
}

const Error kNone;

Error noMemory() {
  return {ErrorCode::kOutOfMemory, "there was no memory for the message"};
}

// UCX calls back in C frames, through which no exception may pass. So its callbacks only record events, in
// UcpOperations and UcpEndpoints. progress() and close() call tell(), which hands the events out. onMessage() hands
// messages out at once, because eager bytes are valid during the callback only. It catches all exceptions.
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
  Error connect(const std::string& address, EndpointId& endpoint) override {
    const UcxLog::Working working(log_);
    return endpoints_.connect(unwrapAddress(address).full, endpoint);
  }
  Error connectOverNetwork(const std::string& address, EndpointId& endpoint) override {
    const UcxLog::Working working(log_);
    return endpoints_.connect(unwrapAddress(address).network, endpoint);
  }
  void send(
      EndpointId endpoint,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory memory) override;
  void receive(void* rendezvous, void* into, uint64_t bytes, OperationDone done, Memory memory) override;
  bool canShare(const void* deviceMemory, uint64_t bytes) const override {
    return deviceMemory_.canShare(deviceMemory, bytes);
  }
  const Error& deviceMemoryRefusal() const override {
    return deviceMemory_.refusal();
  }
  void release(void* rendezvous) override;
  const void* originOf(void* rendezvous) const override;
  bool closeOrigin(const void* origin) override;
  unsigned progress() override;
  bool arm() override;
  size_t operationsInFlight() const override {
    return operations_.inFlight();
  }
  std::vector<std::string> lanes(EndpointId endpoint) const override {
    return endpoints_.lanes(endpoint);
  }
  RepairState repairState() override {
    return repair_->state();
  }
  void scanForRepair() override {
    repair_->scan();
  }
  void abandon(EndpointId endpoint) override {
    const UcxLog::Working working(log_);
    endpoints_.abandon(endpoint);
    log_.explain(); // the listener knows why
  }
  void close(int64_t limitMs) override;

 private:
  static ucs_status_t onMessage(
      void* self,
      const void* header,
      size_t headerBytes,
      void* data,
      size_t bytes,
      const ucp_am_recv_param_t* param) noexcept;
  ucs_status_t onRendezvous(
      std::span<const std::byte> header, void* descriptor, size_t bytes, const void* origin) noexcept;

  void noteLoss() noexcept;
  unsigned tell();
  void tellAll() noexcept;

  void destroy();

  TransportListener* listener_ = nullptr;
  std::optional<FilesForUcx> files_{std::in_place};
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string address_;
  int eventFd_ = -1;
  DeviceMemoryAccess deviceMemory_;
  std::optional<QueueRepair> repair_;
  UcxLog log_;
  UcpEndpoints endpoints_{log_};
  UcpOperations operations_{endpoints_, log_};
  UcpRendezvousList rendezvous_;

  // For the next tell().
  std::exception_ptr loss_; // why the first message was lost
  uint64_t losses_ = 0;
};

UcpTransport::UcpTransport(size_t expectedPeers, const std::string& networkDevices) {
  context_ = startUcx(expectedPeers, networkDevices);
  try {
    deviceMemory_ = DeviceMemoryAccess(context_);
    ucp_worker_params_t workerParams{};
    workerParams.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    workerParams.thread_mode = UCS_THREAD_MODE_SERIALIZED; // the worker lock serializes
    const std::set<uintptr_t> othersQueues = SharedMemoryQueue::mapped();
    check(ucp_worker_create(context_, &workerParams, &worker_), "creating a UCX worker");
    repair_.emplace(SharedMemoryQueue::mappedSince(othersQueues), whyQueuesAreNotRepaired(loadedUcpLibrary().version));

    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
        UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    handler.id = kMessageId;
    handler.cb = &UcpTransport::onMessage;
    handler.arg = this;
    // Without this flag UCX hands large eager messages over in fragments.
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    check(ucp_worker_set_am_recv_handler(worker_, &handler), "registering the UCX message handler");
    check(ucp_worker_get_efd(worker_, &eventFd_), "getting UCX's event descriptor");
    endpoints_.setWorker(worker_, eventFd_);
    address_ = wrapAddress({workerAddress(worker_, 0), workerAddress(worker_, UCP_WORKER_ADDRESS_FLAG_NET_ONLY)});
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
  files_.reset(); // this object may live on without the reserve
}

std::vector<std::pair<std::string, std::string>> UcpTransport::description() const {
  const UcpLibrary library = loadedUcpLibrary();
  return {
      {"ucx.version", library.version},
      {"ucx.path", library.path},
      {"ucx.shared_memory_repair", repair_->description()}};
}

unsigned UcpTransport::tell() {
  if (std::exception_ptr loss = std::exchange(loss_, nullptr)) {
    warnOfLoss(loss);
  }
  unsigned told = operations_.tell();
  while (const UcpEndpoint* endpoint = endpoints_.takeFailed()) {
    ++told;
    listener_->onEndpointFailed(endpoint->id, endpoint->failure);
  }
  return told;
}

void UcpTransport::tellAll() noexcept {
  for (bool isAllTold = false; !isAllTold;) {
    try {
      tell();
      isAllTold = true;
    } catch (...) { // the closing thread cannot do anything about it
    }
  }
}

void UcpTransport::send(
    EndpointId endpointId,
    const wire::Header& header,
    std::span<const std::byte> bytes,
    SendMode mode,
    OperationDone done,
    Memory memory) {
  const UcxLog::Working working(log_);
  UcpEndpoint& endpoint = endpoints_.at(endpointId);
  if (endpoint.isDead()) {
    done(endpoints_.failureOf(endpoint));
    return;
  }
  if (memory == Memory::kDevice) {
    if (const Error& refusal = deviceMemory_.refusalOf(bytes.data(), bytes.size())) {
      done(refusal);
      return;
    }
  }
  UcpOperation* operation = operations_.begin(done, &endpoint);
  if (operation == nullptr) {
    done(noMemory());
    return;
  }
  operation->header = header;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
      UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &UcpOperations::onSendDone;
  param.user_data = operation;
  // The agent decides which protocol suits, once for all lanes: UCX's own threshold differs from lane to lane.
  param.flags =
      mode == SendMode::kEager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV | UCP_AM_SEND_FLAG_REPLY; // originOf()
  param.memory_type = memoryTypeOf(memory);
  operations_.onSubmitted(
      operation,
      ucp_am_send_nbx(
          endpoint.handle,
          kMessageId,
          &operation->header,
          sizeof(operation->header),
          bytes.data(),
          bytes.size(),
          &param));
}

void UcpTransport::receive(void* handle, void* into, uint64_t bytes, OperationDone done, Memory memory) {
  const UcxLog::Working working(log_);
  void* const descriptor = rendezvous_.take(handle)->descriptor;
  const Error& refusal = memory == Memory::kDevice ? deviceMemory_.refusalOf(into, bytes) : kNone;
  UcpOperation* operation = descriptor != nullptr && !refusal ? operations_.begin(done) : nullptr;
  if (operation == nullptr) {
    if (descriptor != nullptr) {
      ucp_am_data_release(worker_, descriptor);
    }
    done(refusal ? refusal : noMemory());
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &UcpOperations::onReceiveDone;
  param.user_data = operation;
  param.memory_type = memoryTypeOf(memory);
  operations_.onSubmitted(operation, ucp_am_recv_data_nbx(worker_, descriptor, into, bytes, &param));
}

void UcpTransport::release(void* handle) {
  const UcxLog::Working working(log_);
  rendezvous_.release(worker_, handle);
}

const void* UcpTransport::originOf(void* handle) const {
  return static_cast<const UcpRendezvous*>(handle)->origin;
}

bool UcpTransport::closeOrigin(const void* origin) {
  const UcxLog::Working working(log_);
  return endpoints_.closeInternal(static_cast<ucp_ep_h>(const_cast<void*>(origin)));
}

ucs_status_t UcpTransport::onMessage(
    void* self,
    const void* header,
    size_t headerBytes,
    void* data,
    size_t bytes,
    const ucp_am_recv_param_t* param) noexcept {
  auto* transport = static_cast<UcpTransport*>(self);
  const std::span<const std::byte> headerSpan(static_cast<const std::byte*>(header), headerBytes);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    const bool isKnown = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
    return transport->onRendezvous(headerSpan, data, bytes, isKnown ? param->reply_ep : nullptr);
  }
  try {
    transport->listener_->onEager(headerSpan, {static_cast<const std::byte*>(data), bytes});
  } catch (...) {
    transport->noteLoss();
  }
  return UCS_OK;
}

ucs_status_t UcpTransport::onRendezvous(
    std::span<const std::byte> header, void* descriptor, size_t bytes, const void* origin) noexcept {
  UcpRendezvous* const rendezvous = rendezvous_.add(descriptor, origin);
  if (rendezvous == nullptr) {
    return UCS_ERR_NO_MEMORY; // UCX takes its descriptor back, and the sender's operation ends with this status
  }
  try {
    listener_->onRendezvous(header, rendezvous, bytes);
    return UCS_INPROGRESS; // the descriptor is kept here
  } catch (...) {
    noteLoss();
    rendezvous->descriptor = nullptr; // UCX takes it back, and the listener may have kept the handle
    return UCS_ERR_NO_MEMORY;
  }
}

void UcpTransport::noteLoss() noexcept {
  if (losses_++ == 0) {
    loss_ = std::current_exception();
  }
}

unsigned UcpTransport::progress() {
  const UcxLog::Working working(log_);
  const unsigned events = ucp_worker_progress(worker_);
  endpoints_.progress();
  const unsigned told = tell();
  log_.showOld();
  return events + told;
}

bool UcpTransport::arm() {
  const bool isAllTold = !operations_.hasCompleted() && !endpoints_.hasFailures();
  return isAllTold && ucp_worker_arm(worker_) != UCS_ERR_BUSY;
}

void UcpTransport::close(int64_t limitMs) {
  if (worker_ == nullptr) {
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(limitMs);
  std::optional<UcxLog::Working> working(log_);
  rendezvous_.releaseDescriptors(worker_);
  endpoints_.abandonAll();
  const auto turn = [this] {
    try {
      return progress();
    } catch (...) { // a callback has thrown; progress() has handed out its event
      return 1u;
    }
  };
  while (endpoints_.isDraining() && Clock::now() < deadline) {
    if (turn() == 0 && arm()) {
      pollfd event{eventFd_, POLLIN, 0};
      (void)poll(&event, 1, 1);
    }
  }
  rendezvous_.releaseDescriptors(worker_); // of messages that arrived during the wait

  // Closes by force the endpoints that could not be drained. A card then ends its requests, which takes progress but no
  // peer. The deadline is for requests that UCX leaves behind.
  endpoints_.force(/*areOverTcp=*/false);
  const auto isForcing = [this] { return endpoints_.isForcing(operations_.inFlight() != 0); };
  const auto forcedDeadline = Clock::now() + std::chrono::milliseconds(500);
  while (isForcing() && Clock::now() < forcedDeadline) {
    turn();
  }
  // TCP comes last, because both ends of a connection might close at once (see UcpEndpoints::closeWhenDrained()). Its
  // requests then get only as much progress as they need. Without any progress, ucp_worker_destroy() would free some of
  // UCX's own memory twice (1.22).
  if (operations_.inFlight() != 0) { // else there is nothing to cancel
    endpoints_.force(/*areOverTcp=*/true);
  }
  for (int turns = 0; turns < kTurnsToCancel && isForcing(); ++turns) {
    turn();
  }
  endpoints_.dropFlushes();
  log_.explain(); // this side has given everything up
  working.reset(); // from here on, UCX shows its errors: they are not ordinary
  if (operations_.inFlight() != 0) {
    working.emplace(log_, /*isLeaving=*/true);
  }
  destroy(); // runs callbacks: operations must exist until here
  working.reset();
  operations_.cancelAll();
  tellAll();
  rendezvous_.clear();
}

} // namespace

std::unique_ptr<Transport> makeUcpTransport(size_t expectedPeers, const std::string& networkDevices) {
  return std::make_unique<UcpTransport>(expectedPeers, networkDevices);
}

} // namespace torch_ucx_rpc
