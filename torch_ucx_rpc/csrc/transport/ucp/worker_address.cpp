#include "transport/ucp/worker_address.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace torch_ucx_rpc {

namespace {

struct AddressPrefix {
  uint32_t magic;
  uint32_t checksum;
};
constexpr uint32_t kAddressMagic = 0x41584355; // "UCXA"

// FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
uint32_t checksumOf(std::string_view bytes) {
  uint32_t sum = 2166136261u;
  for (const char byte : bytes) {
    sum = (sum ^ static_cast<unsigned char>(byte)) * 16777619u;
  }
  return sum;
}

} // namespace

std::string sealAddress(std::string_view ucxAddress) {
  const AddressPrefix prefix{kAddressMagic, checksumOf(ucxAddress)};
  std::string address(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
  address += ucxAddress;
  return address;
}

std::string_view openAddress(std::string_view address) {
  AddressPrefix prefix{};
  const std::string_view ucxAddress = address.substr(std::min(sizeof(prefix), address.size()));
  std::memcpy(&prefix, address.data(), address.size() - ucxAddress.size());
  const bool isWhole = prefix.magic == kAddressMagic && prefix.checksum == checksumOf(ucxAddress);
  return isWhole ? ucxAddress : std::string_view();
}

} // namespace torch_ucx_rpc
