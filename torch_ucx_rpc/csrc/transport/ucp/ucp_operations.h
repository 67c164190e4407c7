#pragma once

#include "base/intrusive_list.h"
#include "transport/transport.h"
#include "transport/ucp/ucx_log.h"
#include "wire/header.h"

#include <ucp/api/ucp.h>

#include <cstddef>

namespace torch_ucx_rpc {

class UcpEndpoints;
class UcpOperations;
struct UcpEndpoint;

// One send or receive. UCX owns its buffers until it calls back.
struct UcpOperation {
  UcpOperations* owner;
  const UcpEndpoint* endpoint; // of a send; null for a receive
  OperationDone done;
  wire::Header header{}; // of a send; the sender may change its own
  ucs_status_t status = UCS_INPROGRESS;
  UcpOperation* before = nullptr; // in a list of its owner
  UcpOperation* after = nullptr;
};

// The sends and receives of one UCX worker. The worker lock guards them. UCX's callbacks only note that an operation is
// complete, in members that need no memory. tell() calls its `done`. A list of incomplete operations lets cancelAll()
// end operations for which UCX never calls back.
class UcpOperations {
 public:
  UcpOperations(const UcpEndpoints& endpoints, UcxLog& log) : endpoints_(endpoints), log_(log) {}

  // Returns null, and leaves `done` as it is, if memory runs out.
  UcpOperation* begin(OperationDone& done, const UcpEndpoint* endpoint = nullptr) noexcept;
  // Takes the result of the UCX call that began the operation. If the operation is over already, calls its `done`.
  void onSubmitted(UcpOperation* operation, ucs_status_ptr_t returned);

  // Callbacks for UCX, whose user data is the operation.
  static void onSendDone(void* request, ucs_status_t status, void* operation) noexcept;
  static void onReceiveDone(void* request, ucs_status_t status, size_t bytes, void* operation) noexcept;

  // Calls `done` of each operation that UCX has completed. Returns their number. If one throws, the rest stay noted.
  unsigned tell();
  // Completes all operations as canceled, once UCX can no longer complete them. The next tell() calls each `done`.
  void cancelAll() noexcept;

  // How many operations have begun whose `done` has not been called.
  size_t inFlight() const {
    return inFlight_;
  }
  bool hasCompleted() const {
    return !completed_.isEmpty();
  }

 private:
  void complete(UcpOperation* operation, ucs_status_t status) noexcept;
  void tell(UcpOperation* operation);

  const UcpEndpoints& endpoints_;
  UcxLog& log_;
  IntrusiveList<UcpOperation> pending_; // operations that UCX has not completed
  IntrusiveList<UcpOperation> completed_;
  size_t inFlight_ = 0; // operations of both lists
};

} // namespace torch_ucx_rpc
