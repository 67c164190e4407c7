#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

namespace torch_ucx_rpc {

// HMAC-SHA256 (RFC 2104) with one key, by OpenSSL's libcrypto, version 3 or newer.
//
// The library is loaded by its soname when it is first needed. So a process without secrets needs no libcrypto, and the
// build needs no headers of it. The copy that Python's hashlib has loaded is taken first, then the system's.
//
// Not thread-safe: use one for each thread, or a lock.
class Hmac {
 public:
  // The leftmost half of the output, the shortest that RFC 2104 advises.
  using Tag = std::array<std::byte, 16>;

  // Throws std::runtime_error, which names the cure, if there is no libcrypto.
  explicit Hmac(std::string_view key);

  // Returns the tag of the parts, one after another. It does not cover where one part ends, so the caller puts the
  // lengths in.
  Tag of(std::initializer_list<std::span<const std::byte>> parts);

  // Compares in a time that does not depend on where the two differ, so that a forger learns nothing from the clock.
  static bool areEqual(const Tag& left, const Tag& right);

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_; // EVP_MAC_CTX
};

} // namespace torch_ucx_rpc
