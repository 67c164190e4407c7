#pragma once

#include <torch/csrc/distributed/rpc/message.h>

namespace torch_ucx_rpc {

// The agent tells torch's requests apart by their types.

// Whether running the request calls Python. TorchScript, operators and torch's own bookkeeping do not: they can run
// while a Python function holds the GIL.
bool runsPython(torch::distributed::rpc::MessageType request);

// Whether RRef.to_here() has sent the request. Nothing else sends requests of these types.
bool isFetch(torch::distributed::rpc::MessageType request);

// Whether running the request takes only microseconds in any program: it involves neither Python nor destructors of the
// user's objects.
bool mayRunOnDriver(torch::distributed::rpc::MessageType request);

// The same for torch's work when the answer arrives. No thread waits for these answers.
bool mayCompleteOnDriver(torch::distributed::rpc::MessageType request);

// Whether running the request makes the value of an RRef: rpc.remote() has sent it. Autograd or the profiler may have
// wrapped it.
bool makesRRef(const torch::distributed::rpc::Message& request);

// Whether the request must run even if its caller has given up, because other workers count on its effect. A request
// with an RRef among its arguments is one: the RRef's owner and the caller wait until the callee confirms the RRef.
bool mustExecute(const torch::distributed::rpc::Message& request);

// The answer to give in place of a peer that is gone; null if the request needs none. torch repeats some requests until
// they are answered. It ends the process if a request is never answered, because the thread that repeats requests does
// not catch exceptions of callbacks. A worker that is gone does not need the information in them.
c10::intrusive_ptr<torch::distributed::rpc::Message> syntheticAck(torch::distributed::rpc::MessageType request);

} // namespace torch_ucx_rpc
