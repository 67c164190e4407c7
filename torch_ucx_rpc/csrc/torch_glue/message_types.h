#pragma once

#include <torch/csrc/distributed/rpc/message.h>

namespace torch_ucx_rpc {

// What the agent knows of torch's requests by their types.

// Whether running it calls Python. What TorchScript, operators and torch's own bookkeeping do goes on beside a function of Python's
// that holds the GIL.
bool runsPython(torch::distributed::rpc::MessageType request);

// Whether RRef.to_here() has sent it, as nobody else does.
bool isFetch(torch::distributed::rpc::MessageType request);

// Whether running it takes a few microseconds whatever the user does: neither Python nor a destructor of user's is involved.
bool mayRunOnDriver(torch::distributed::rpc::MessageType request);

// The same of what torch does with the answer; nobody waits for that.
bool mayCompleteOnDriver(torch::distributed::rpc::MessageType request);

// Whether others than its caller count on its being run, also after its caller has given up.
bool mustExecute(torch::distributed::rpc::MessageType request);

// torch sends some until they are answered, and ends the process over one that never is: its thread for that lets exceptions of
// callbacks pass. A worker that is gone need not know what they say; null for any other.
c10::intrusive_ptr<torch::distributed::rpc::Message> syntheticAck(torch::distributed::rpc::MessageType request);

} // namespace torch_ucx_rpc
