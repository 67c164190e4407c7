#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <string>

// UCX itself: how it is started, what it needs, and what its status codes mean. ucp_transport.h tells which UCX it is.
namespace torch_ucx_rpc {

// Starts UCX with our settings where the user has set nothing. Throws std::runtime_error, as check() does. The
// parameters are those of makeUcpTransport().
ucp_context_h startUcx(size_t expectedPeers, const std::string& networkDevices);

// True if UCX_TLS, set to `tls`, lets UCX use this transport: "tcp", "posix", "sysv" and so on. Knows UCX's groups of
// transports ("shm"), exclusion ("^tcp") and the auxiliary form ("tcp:aux"). An empty `tls` allows all.
bool allowsTransport(const std::string& tls, const std::string& transport);

// A sentence on what UCX_TLS, set to `tls`, lacks for connecting to anybody; empty if it lacks nothing that we know of.
std::string whatIsLackingToConnect(const std::string& tls);

// The meaning of a status: of an operation ...
Error errorOf(ucs_status_t status);
// ... of the making of an endpoint, which involves no peer yet, ...
Error errorOfConnecting(ucs_status_t status);
// ... and of the death of an endpoint. `someFile` is any open descriptor: see filesForAConnection().
Error errorOfEndpoint(ucs_status_t status, int someFile);

// For what UCX needs to start: throws std::runtime_error with a sentence for the user if `what` has failed.
void check(ucs_status_t status, const char* what);

// An error where this process may not open the files that a connection takes. They are made as copies of `someFile`,
// and closed again. UCX would come to half a connection then, which says nothing of files and stays lost: it is better
// not begun.
Error filesForAConnection(int someFile);

} // namespace torch_ucx_rpc
