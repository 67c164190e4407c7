#include "transport/ucp/ucp_endpoints.h"

#include "transport/ucp/ucp_library.h"

#include <algorithm>

namespace torch_ucx_rpc {

namespace {

// The most lanes that lanes() looks at: UCP_MAX_LANES of UCX 1.14. UCX 1.22 allows 64, if its settings ask for many.
constexpr unsigned kMaxLanes = 16;

Error withReason(const Error& error, const std::string& reason) {
  return {error.code(), error.message() + reason, error.cause()};
}

Error abandoned() {
  return {ErrorCode::kCanceled, "the endpoint was abandoned"};
}

} // namespace

// ------------------------------------------------------------------------------------------------ making, failing

Error UcpEndpoints::connect(std::string_view ucxAddress, EndpointId& endpoint) {
  if (ucxAddress.empty()) {
    return {ErrorCode::kPeerFailed, "that is not the address of a UCX worker of this package, or it is damaged"};
  }
  if (Error error = filesForAConnection(someFile_)) {
    return error;
  }
  auto created = std::make_unique<UcpEndpoint>();
  created->owner = this;
  created->id = static_cast<EndpointId>(endpoints_.size());
  endpoints_.reserve(endpoints_.size() + 1); // once UCX has the endpoint, nothing may fail

  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(ucxAddress.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcpEndpoints::onError;
  params.err_handler.arg = created.get();
  const ucs_status_t status = ucp_ep_create(worker_, &params, &created->handle);
  if (status != UCS_OK) {
    created->reason = log_.takeReason();
    // On some hosts UCX notices at once that a network is down, and on others later. Here the failure shows later on
    // all hosts.
    if (created->reason.find("connect(fd=") == std::string::npos) {
      return withReason(errorOfConnecting(status), created->reason);
    }
    created->reported = status;
    reported_.push(created.get());
  }
  endpoint = created->id;
  endpoints_.push_back(std::move(created));
  return {};
}

void UcpEndpoints::onError(void* endpoint, ucp_ep_h /*handle*/, ucs_status_t status) noexcept {
  auto* failed = static_cast<UcpEndpoint*>(endpoint);
  if (failed->reported == UCS_OK) {
    failed->reported = status;
    failed->reason = failed->owner->log_.takeReason();
    if (!failed->failure) { // else this side has given it up, and is closing it
      failed->owner->reported_.push(failed);
    }
  }
}

Error UcpEndpoints::failureOf(const UcpEndpoint& endpoint) const {
  return endpoint.failure ? endpoint.failure
                          : withReason(errorOfEndpoint(endpoint.reported, someFile_), endpoint.reason);
}

Error UcpEndpoints::failureOfSend(const UcpEndpoint& endpoint, ucs_status_t status) const {
  if (endpoint.isDead()) {
    return failureOf(endpoint);
  }
  // A send that UCX cancels says nothing yet: UCX reports later why its endpoint dies.
  return status == UCS_ERR_CANCELED ? errorOf(status) : errorOfEndpoint(status, someFile_);
}

UcpEndpoint* UcpEndpoints::takeFailed() {
  UcpEndpoint* const failed = closed_.pop();
  if (failed != nullptr) {
    failed->failure = failureOf(*failed);
  }
  return failed;
}

std::vector<std::string> UcpEndpoints::lanes(EndpointId endpointId) const {
  const UcpEndpoint& endpoint = at(endpointId);
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

// -------------------------------------------------------------------------------------------------------- closing

// UCX ends the process in two cases (1.22, and master in August 2026). In each it uses memory that it has freed:
// - Both sides close a TCP connection while this side still has bytes for it, after a cut for instance. One event may
//   say that the socket is writable and that the other side has closed it. Reading the end of the stream frees the
//   bytes that are written next (uct_tcp_iface_handle_events()). So there must be no such bytes. A flush that completes
//   at once proves that.
// - An endpoint that has failed is closed while it is being flushed (ucp_ep_flush_resume_slow_path_callback()). Its
//   lanes are gone, so nothing keeps it alive until the flush has ended.
void UcpEndpoints::closeWhenDrained(UcpEndpoint& endpoint) {
  draining_.reserve(draining_.size() + 1);
  const ucp_request_param_t param{};
  const ucs_status_ptr_t flush = ucp_ep_flush_nbx(endpoint.handle, &param);
  if (UCS_PTR_IS_PTR(flush)) { // it has not completed at once, so there may be bytes
    draining_.emplace_back(&endpoint, flush);
  } else {
    closeHandle(endpoint.handle);
  }
}

// A forced close cancels everything that the endpoint has under way. Every endpoint needs one before its worker is
// destroyed. ucp_worker_destroy() leaves an endpoint's requests where they are. Builds of UCX with assertions then
// abort (ucp_ep_destroy_base() asserts that proto_reqs is empty).
void UcpEndpoints::closeHandle(ucp_ep_h& handle) {
  if (handle == nullptr) {
    return;
  }
  closing_.reserve(closing_.size() + 1);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(handle, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) {
    closing_.push_back(request);
  }
}

bool UcpEndpoints::closeInternal(ucp_ep_h handle) {
  const auto own = std::ranges::find_if(
      endpoints_, [&](const std::unique_ptr<UcpEndpoint>& endpoint) { return endpoint->handle == handle; });
  if (own != endpoints_.end()) {
    return (*own)->isDead(); // a dead one is being closed already
  }
  closing_.reserve(closing_.size() + 1);
  const ucp_request_param_t param{};
  const ucs_status_ptr_t flush = ucp_ep_flush_nbx(handle, &param); // see closeWhenDrained()
  if (flush == nullptr) {
    closeHandle(handle);
  } else if (UCS_PTR_IS_PTR(flush)) {
    closing_.push_back(flush);
  }
  return true;
}

void UcpEndpoints::progress() {
  closeReported();
  closeDrained();
  std::erase_if(closing_, [](ucs_status_ptr_t request) {
    const bool isDone = ucp_request_check_status(request) != UCS_INPROGRESS;
    if (isDone) {
      ucp_request_free(request);
    }
    return isDone;
  });
}

void UcpEndpoints::closeReported() {
  while (UcpEndpoint* const failed = reported_.first()) {
    closeHandle(failed->handle); // the endpoint stays queued if memory runs out
    closed_.push(reported_.pop());
  }
}

void UcpEndpoints::closeDrained() {
  // These endpoints are flushed again after the loop, since closeWhenDrained() adds to draining_.
  std::vector<UcpEndpoint*> drained;
  drained.reserve(draining_.size());
  std::erase_if(draining_, [&](const auto& item) {
    const auto [endpoint, flush] = item;
    const ucs_status_t status = ucp_request_check_status(flush);
    if (status == UCS_INPROGRESS) {
      return false;
    }
    ucp_request_free(flush);
    if (status == UCS_OK && endpoint->handle != nullptr) {
      drained.push_back(endpoint);
    } else {
      closeHandle(endpoint->handle); // the connection has failed, or was forced
    }
    return true;
  });
  for (UcpEndpoint* endpoint : drained) {
    closeWhenDrained(*endpoint); // the next flush proves that nothing has been begun since
  }
}

// Only TCP needs draining (see closeWhenDrained()). Other transports must not be drained, because that may never end.
// The queue of a dead process stays full, and a card waits for acknowledgements of a host that is cut off. An endpoint
// with a lane of shared memory may be forced even if it also has one of TCP.
bool UcpEndpoints::mayBeForced(const UcpEndpoint& endpoint) const {
  const std::vector<std::string> lanes = this->lanes(endpoint.id);
  const auto isTcp = [](const std::string& lane) { return lane.starts_with("tcp/"); };
  const auto isMemory = [](const std::string& lane) { return lane.ends_with("/memory"); };
  return std::any_of(lanes.begin(), lanes.end(), isMemory) ||
      (!lanes.empty() && std::none_of(lanes.begin(), lanes.end(), isTcp));
}

void UcpEndpoints::abandon(EndpointId endpointId) {
  UcpEndpoint& endpoint = at(endpointId);
  if (endpoint.isDead()) {
    return;
  }
  endpoint.failure = abandoned();
  if (mayBeForced(endpoint)) {
    closeHandle(endpoint.handle);
  } else {
    closeWhenDrained(endpoint);
  }
}

void UcpEndpoints::abandonAll() {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->handle != nullptr && !endpoint->isDead()) {
      endpoint->failure = abandoned();
      closeWhenDrained(*endpoint);
    }
  }
}

void UcpEndpoints::force(bool areOverTcp) {
  for (const auto& [endpoint, flush] : draining_) {
    const bool hasFailed = endpoint->reported != UCS_OK; // UCX has ended its requests already, see closeWhenDrained()
    if (!hasFailed && endpoint->handle != nullptr && mayBeForced(*endpoint) != areOverTcp) {
      closeHandle(endpoint->handle);
    }
  }
}

bool UcpEndpoints::isForcing(bool hasOperations) const {
  return !closing_.empty() || (hasOperations && draining_.empty()) ||
      std::any_of(draining_.begin(), draining_.end(), [](const auto& item) { return item.first->handle == nullptr; });
}

void UcpEndpoints::dropFlushes() {
  for (const auto& [endpoint, flush] : std::exchange(draining_, {})) {
    ucp_request_free(flush);
  }
}

} // namespace torch_ucx_rpc
