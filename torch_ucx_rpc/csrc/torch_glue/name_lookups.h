#pragma once

#include <cstdint>

namespace torch_ucx_rpc {

// torch's Store asks the resolver for the name of each client, one after the other, and each client for that of the
// Store. The names are for messages of torch's log alone. A question that the network loses costs 5 s or more, so 500
// workers do not start in any reasonable time where the resolver does not answer.
//
// Has torch take addresses for names instead, in the whole process and for good. False where that is not possible.
// Thread-safe.
bool spareNameLookups();

// How many questions have been spared so far.
uint64_t nameLookupsSpared();

} // namespace torch_ucx_rpc
