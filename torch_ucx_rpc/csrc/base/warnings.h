#pragma once

#include <functional>
#include <string>

namespace torch_ucx_rpc {

// Tells the operator of a job something, in one sentence without a full stop at its end. Any thread may warn, with any
// lock: the receiver is never called here.
void warn(std::string sentence);

// Takes warnings from now on, one after the other, on a thread that lives as long as there are some. At first, and
// after an empty receiver, they go to c10's log, which is stderr.
using WarningReceiver = std::function<void(const std::string& sentence)>;
void setWarningReceiver(WarningReceiver receiver);

// Returns when the receiver has had all warnings so far. Not to be called with a lock that the receiver takes.
void flushWarnings();

} // namespace torch_ucx_rpc
