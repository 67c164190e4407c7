#pragma once

#include <cstdint>

namespace torch_ucx_rpc {

// torch's Store asks the resolver for the name of each client, one after the other, and each client asks for the name
// of the Store. torch uses the names only in its log. A lookup that the network loses costs 5 s or more. So 500 workers
// cannot start in reasonable time if the resolver does not answer.
//
// Makes torch use addresses instead of names, in the whole process and for good. False if that is not possible.
// Thread-safe.
bool spareNameLookups();

// How many lookups have been spared so far.
uint64_t nameLookupsSpared();

} // namespace torch_ucx_rpc
