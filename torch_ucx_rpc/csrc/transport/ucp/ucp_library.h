#pragma once

#include "base/error.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <string>

// UCX itself: how it is started, what it needs, and what its status codes mean. Which one it is: ucp_transport.h.
namespace torch_ucx_rpc {

// Starts UCX with our settings where the user has set nothing. Throws std::runtime_error, as check() does. The parameters are
// those of makeUcpTransport().
ucp_context_h startUcx(size_t expectedPeers, const std::string& networkDevices);

Error errorOf(ucs_status_t status);

// For what UCX needs to start: throws std::runtime_error with a sentence for the user, of `what` failed.
void check(ucs_status_t status, const char* what);

// An error where this process may not open as many files more as a connection takes; they are made like `someFile`, and closed
// again. UCX may come to half a connection then, which says nothing of files and is lost for good: it is better not begun.
Error filesForAConnection(int someFile);

} // namespace torch_ucx_rpc
