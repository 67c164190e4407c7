#pragma once

#include "base/error.h"
#include "base/intrusive_list.h"
#include "transport/transport.h"
#include "transport/ucp/ucx_log.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

class UcpEndpoints;

struct UcpEndpoint {
  UcpEndpoints* owner;
  EndpointId id;
  ucp_ep_h handle = nullptr; // null once it is closed
  Error failure; // why it is dead; the listener knows, unless this side has given it up
  ucs_status_t reported = UCS_OK; // why UCX says that it is dead
  std::string reason = {}; // what UCX's log says about that: see UcxLog::takeReason()
  UcpEndpoint* before = nullptr; // in a list of its owner
  UcpEndpoint* after = nullptr;

  bool isDead() const {
    return failure || reported != UCS_OK;
  }
};

// Makes the endpoints of one UCX worker, notices their failures, and closes them. The worker lock guards it. UCX's
// error callback must not close an endpoint. It only notes the endpoint, and progress() closes it.
class UcpEndpoints {
 public:
  explicit UcpEndpoints(UcxLog& log) : log_(log) {}

  // `someFile` is any open descriptor: see filesForAConnection().
  void setWorker(ucp_worker_h worker, int someFile) {
    worker_ = worker;
    someFile_ = someFile;
  }

  // Makes an endpoint, as Transport::connect() does.
  Error connect(std::string_view ucxAddress, EndpointId& endpoint);

  UcpEndpoint& at(EndpointId endpoint) const {
    return *endpoints_[endpoint];
  }
  // Why a dead endpoint is dead.
  Error failureOf(const UcpEndpoint& endpoint) const;
  // Why a send has failed. The status that UCX gives to sends of a dead endpoint may blame the peer although this
  // process lacks a resource.
  Error failureOfSend(const UcpEndpoint& endpoint, ucs_status_t status) const;
  std::vector<std::string> lanes(EndpointId endpoint) const;

  // Closes endpoints that have failed or have drained. Not inside a UCX callback.
  void progress();
  // Takes an endpoint that has failed and is closed, and sets its failure. Null if there is none.
  UcpEndpoint* takeFailed();
  // Whether progress() or takeFailed() would find a failure.
  bool hasFailures() const {
    return !reported_.isEmpty() || !closed_.isEmpty();
  }

  // Gives up one endpoint.
  void abandon(EndpointId endpoint);
  // Closes an endpoint that UCX has made for messages of a peer, unless bytes wait there. Call it only while a receive
  // over that endpoint runs, so that UCX still has it. Returns false if connect() has made the endpoint and it is
  // not dead.
  bool closeInternal(ucp_ep_h handle);

  // Closing the worker calls the following, in this order. abandonAll() begins to flush all endpoints. While that goes
  // on, isDraining() is true.
  void abandonAll();
  bool isDraining() const {
    return !draining_.empty();
  }
  // Closes by force the endpoints that could not be drained: those over TCP, or all others. The others need no draining
  // (see closeWhenDrained()).
  void force(bool areOverTcp);
  // Whether the forced endpoints need more progress.
  bool isForcing(bool hasOperations) const;
  // Frees the requests that UCX has left behind, right before the worker is destroyed.
  void dropFlushes();

 private:
  static void onError(void* endpoint, ucp_ep_h handle, ucs_status_t status) noexcept;

  bool mayBeForced(const UcpEndpoint& endpoint) const;
  void closeWhenDrained(UcpEndpoint& endpoint);
  void closeHandle(ucp_ep_h& handle); // sets it to null
  void closeReported();
  void closeDrained();

  UcxLog& log_;
  ucp_worker_h worker_ = nullptr;
  int someFile_ = -1;
  std::vector<std::unique_ptr<UcpEndpoint>> endpoints_;

  IntrusiveList<UcpEndpoint> reported_; // endpoints whose failure UCX has reported, not closed yet
  IntrusiveList<UcpEndpoint> closed_; // such endpoints, closed and not taken yet

  // Endpoints that this side has given up, and their flushes. progress() closes the endpoints when their flushes are
  // done.
  std::vector<std::pair<UcpEndpoint*, ucs_status_ptr_t>> draining_;
  std::vector<ucs_status_ptr_t> closing_; // requests of closed handles, and flushes of closeInternal()
};

} // namespace torch_ucx_rpc
