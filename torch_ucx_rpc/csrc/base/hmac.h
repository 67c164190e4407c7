#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace torch_ucx_rpc {

// HMAC-SHA256 (RFC 2104) with one key. OpenSSL's libcrypto, version 3 or newer, computes it.
//
// The first use loads libcrypto by its soname. So a process without secrets needs no libcrypto, and the build needs no
// OpenSSL headers. Hmac prefers a copy that the process has already loaded, for Python's hashlib for instance, to the
// system's.
//
// Not thread-safe: use one for each thread, or a lock.
class Hmac {
 public:
  // The leftmost half of the output, the shortest that RFC 2104 advises.
  using Tag = std::array<std::byte, 16>;

  // Throws std::runtime_error if there is no suitable libcrypto. The text says what to install.
  explicit Hmac(std::string_view key);

  // Returns one tag for all parts, joined in this order. The tag does not cover the borders between the parts, so the
  // caller must include their lengths.
  Tag of(std::initializer_list<std::span<const std::byte>> parts);

  // Compares in constant time, so that a forger learns nothing from the duration.
  static bool areEqual(const Tag& left, const Tag& right);

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_; // EVP_MAC_CTX
  std::string key_; // if libcrypto needs it for each tag
};

} // namespace torch_ucx_rpc
