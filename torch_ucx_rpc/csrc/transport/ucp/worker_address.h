#pragma once

#include <string>
#include <string_view>

namespace torch_ucx_rpc {

// The addresses of one UCX worker. Each is UCX's own bytes.
struct WorkerAddress {
  std::string full; // of all its transports
  std::string network; // of those alone that reach other machines, see Transport::connectOverNetwork()
};
struct WorkerAddressView {
  std::string_view full;
  std::string_view network;
};

// Packs both into the one address that this package passes on. UCX trusts what it reads in an address, and asserts it.
// So a checksum stands in front, and a damaged or foreign address becomes an error.
std::string wrapAddress(const WorkerAddress& address);

// Unpacks what wrapAddress() has returned; both are empty for anything else. Points into `address`.
WorkerAddressView unwrapAddress(std::string_view address);

} // namespace torch_ucx_rpc
