#include "transport/ucp/ucp_operations.h"

#include "transport/ucp/ucp_endpoints.h"
#include "transport/ucp/ucp_library.h"

#include <memory>
#include <new>
#include <utility>

namespace torch_ucx_rpc {

// pending_ lists the operation. UCX does not tell which operations it still has, and close() must end them all.
UcpOperation* UcpOperations::begin(OperationDone& done, const UcpEndpoint* endpoint) noexcept {
  auto* operation = new (std::nothrow) UcpOperation{this, endpoint, {}};
  if (operation == nullptr) {
    return nullptr;
  }
  operation->done = std::move(done);
  pending_.push(operation);
  ++inFlight_;
  return operation;
}

void UcpOperations::onSubmitted(UcpOperation* operation, ucs_status_ptr_t returned) {
  // UCX returns a request, and calls back later, only for an operation that it could not complete at once. Otherwise it
  // returns the status instead of a pointer, and never calls back.
  if (UCS_PTR_IS_PTR(returned)) {
    return;
  }
  pending_.remove(operation);
  operation->status = UCS_PTR_RAW_STATUS(returned);
  tell(operation);
}

void UcpOperations::onSendDone(void* request, ucs_status_t status, void* operation) noexcept {
  ucp_request_free(request);
  auto* done = static_cast<UcpOperation*>(operation);
  done->owner->complete(done, status);
}

void UcpOperations::onReceiveDone(void* request, ucs_status_t status, size_t /*bytes*/, void* operation) noexcept {
  onSendDone(request, status, operation);
}

// Called in UCX's callbacks, where nothing may throw or send. So `done` waits for tell().
void UcpOperations::complete(UcpOperation* operation, ucs_status_t status) noexcept {
  pending_.remove(operation);
  operation->status = status;
  completed_.push(operation);
}

unsigned UcpOperations::tell() {
  unsigned told = 0;
  while (UcpOperation* operation = completed_.pop()) {
    ++told;
    tell(operation);
  }
  return told;
}

void UcpOperations::tell(UcpOperation* operation) {
  const std::unique_ptr<UcpOperation> owned(operation); // also if `done` throws: it has been called
  --inFlight_;
  const ucs_status_t status = operation->status;
  if (status != UCS_OK) {
    log_.explain();
  }
  const bool isFailedSend = status != UCS_OK && operation->endpoint != nullptr;
  operation->done(isFailedSend ? endpoints_.failureOfSend(*operation->endpoint, status) : errorOf(status));
}

void UcpOperations::cancelAll() noexcept {
  while (UcpOperation* operation = pending_.first()) {
    complete(operation, UCS_ERR_CANCELED);
  }
}

} // namespace torch_ucx_rpc
