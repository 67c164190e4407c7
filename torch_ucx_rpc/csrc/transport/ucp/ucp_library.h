#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <string>

// UCX itself: its start, its needs, and the meaning of its status codes. ucp_transport.h says which UCX it is.
namespace torch_ucx_rpc {

// Starts UCX with this package's settings where the user has set nothing. Throws std::runtime_error, as check() does.
// The parameters are those of makeUcpTransport().
ucp_context_h startUcx(size_t expectedPeers, const std::string& networkDevices);

// True if UCX_TLS, set to `tls`, lets UCX use this transport: "tcp", "posix", "sysv" and so on. Knows UCX's groups of
// transports ("shm"), exclusion ("^tcp") and the auxiliary form ("tcp:aux"). An empty `tls` allows all.
bool allowsTransport(const std::string& tls, const std::string& transport);

// Says in a sentence what UCX_TLS, set to `tls`, lacks for connecting to another worker. Empty if it lacks nothing
// known.
std::string whatIsLackingToConnect(const std::string& tls);

// The meaning of the status of an operation.
Error errorOf(ucs_status_t status);
// The meaning of the status of making an endpoint, which involves no peer yet.
Error errorOfConnecting(ucs_status_t status);
// The meaning of the status with which an endpoint died. `someFile` is any open descriptor: see filesForAConnection().
Error errorOfEndpoint(ucs_status_t status, int someFile);

// The address of a UCX worker in UCX's own format. `flags` are UCX's ucp_worker_address_flags_t.
std::string workerAddress(ucp_worker_h worker, uint32_t flags);

// Checks a step of UCX's start. Throws std::runtime_error with a sentence for the user if `what` has failed.
void check(ucs_status_t status, const char* what);

// Returns an error if this process may not open the files that a connection takes. It makes that many copies of
// `someFile`, and closes them again. Without these files UCX would make half a connection, which never works and
// reports nothing about files. So the caller must not begin the connection.
Error filesForAConnection(int someFile);

} // namespace torch_ucx_rpc
