#pragma once

#include <string>
#include <string_view>

namespace torch_ucx_rpc {

// The addresses of one UCX worker. Each is UCX's own bytes.
struct WorkerAddress {
  std::string full; // with all its transports
  std::string network; // with transports to other machines alone, see Transport::connectOverNetwork()
};
struct WorkerAddressView {
  std::string_view full;
  std::string_view network;
};

// Packs both into the one address that this package passes on. UCX does not validate an address: it only asserts what
// it reads. So this package puts a checksum in front, and a damaged or foreign address becomes an error.
std::string wrapAddress(const WorkerAddress& address);

// Unpacks an address of wrapAddress(). Both parts are empty for anything else. Points into `address`.
WorkerAddressView unwrapAddress(std::string_view address);

} // namespace torch_ucx_rpc
