#include "transport/ucp/worker_address.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torch_ucx_rpc {

namespace {

struct AddressPrefix {
  uint32_t magic;
  uint32_t checksum; // of everything that follows it
  uint32_t fullBytes; // the network address is the rest
};
constexpr uint32_t kAddressMagic = 0x42584355; // "UCXB"; "UCXA" had one address

// FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
uint32_t checksumOf(std::string_view bytes) {
  uint32_t sum = 2166136261u;
  for (const char byte : bytes) {
    sum = (sum ^ static_cast<unsigned char>(byte)) * 16777619u;
  }
  return sum;
}

std::string_view summed(std::string_view address) {
  return address.substr(offsetof(AddressPrefix, fullBytes));
}

} // namespace

std::string wrapAddress(const WorkerAddress& address) {
  AddressPrefix prefix{kAddressMagic, 0, static_cast<uint32_t>(address.full.size())};
  std::string wrapped(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
  wrapped += address.full;
  wrapped += address.network;
  prefix.checksum = checksumOf(summed(wrapped));
  std::memcpy(wrapped.data(), &prefix, sizeof(prefix));
  return wrapped;
}

WorkerAddressView unwrapAddress(std::string_view address) {
  AddressPrefix prefix{};
  if (address.size() < sizeof(prefix)) {
    return {};
  }
  std::memcpy(&prefix, address.data(), sizeof(prefix));
  const std::string_view both = address.substr(sizeof(prefix));
  if (prefix.magic != kAddressMagic || prefix.checksum != checksumOf(summed(address)) ||
      prefix.fullBytes > both.size()) {
    return {};
  }
  return {both.substr(0, prefix.fullBytes), both.substr(prefix.fullBytes)};
}

} // namespace torch_ucx_rpc
