#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <string>

namespace torch_ucx_rpc {

// rpc.remote() fails if the owner cannot read the request, lacks the function, or refuses the request. At the owner,
// torch then does not know the RRef, and other workers may wait there for its value for ever. At the caller it stays
// pending, and shutdown() waits for it. So the caller sends the owner a second request in place of the failed one. The
// second request makes an RRef whose value is the error, as a function that raises does. torch has no such message:
// this one is an EXCEPTION, which torch sends as an answer only.

// Returns the request for the RRef that has this future (RRef::getOwnerCreationFuture()). Null while torch does not
// know the RRef: the thread that makes it tells torch after RpcAgent::send().
c10::intrusive_ptr<torch::distributed::rpc::Message> describeFailedRRef(
    const torch::distributed::rpc::JitFuture& creation, const std::string& why);

// The owner calls these: the first recognizes such a request. The second makes the RRef, and returns the answer that
// rpc.remote() waits for. An RRef that has a value keeps it: then only the answer was lost. Throws for a request that
// it cannot read. May take the GIL, in callbacks of calls that wait for the value.
bool isFailedRRef(const torch::distributed::rpc::Message& request);
c10::intrusive_ptr<torch::distributed::rpc::JitFuture> makeFailedRRef(const torch::distributed::rpc::Message& request);

} // namespace torch_ucx_rpc
