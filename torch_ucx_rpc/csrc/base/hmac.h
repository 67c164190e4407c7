#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

namespace torch_ucx_rpc {

// HMAC-SHA256 (RFC 2104) with one key, by OpenSSL's libcrypto, version 3 or newer. The library is loaded when it is first needed,
// by its soname, so that a process without secrets does without it and the build needs no headers of it: what Python's
// own hashlib has loaded is taken, else what the system has. Not thread-safe; one for each thread, or a lock.
class Hmac {
 public:
  // The leftmost half of the output, the shortest that RFC 2104 advises.
  using Tag = std::array<std::byte, 16>;

  // Throws std::runtime_error where there is no libcrypto, with the cure.
  explicit Hmac(std::string_view key);

  // Over the parts, one behind the other.
  Tag of(std::initializer_list<std::span<const std::byte>> parts);

  // In a time that does not depend on where they differ.
  static bool areEqual(const Tag& left, const Tag& right);

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_; // EVP_MAC_CTX
};

} // namespace torch_ucx_rpc
