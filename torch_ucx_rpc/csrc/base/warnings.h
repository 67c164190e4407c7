#pragma once

#include <functional>
#include <string>

namespace torch_ucx_rpc {

// Warns the operator of the job. `sentence` is one sentence without a full stop at its end. Any thread may call warn()
// with any lock held, because warn() never calls the receiver itself.
void warn(std::string sentence);

// Sends later warnings to `receiver`, one after another, on a thread that lives only while there are warnings. An empty
// receiver, the default, sends them to c10's log, which is stderr.
using WarningReceiver = std::function<void(const std::string& sentence)>;
void setWarningReceiver(WarningReceiver receiver);

// Returns when the receiver has had all earlier warnings. The caller must not hold a lock that the receiver takes.
void flushWarnings();

} // namespace torch_ucx_rpc
