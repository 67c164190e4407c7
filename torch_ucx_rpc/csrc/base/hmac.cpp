#include "base/hmac.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace torch_ucx_rpc {

namespace {

// From <openssl/core.h>; part of the ABI that OpenSSL keeps within a major version.
struct OsslParam {
  const char* key;
  unsigned int dataType;
  void* data;
  size_t dataBytes;
  size_t returnedBytes;
};

// The functions of libcrypto that are used here, as <openssl/evp.h> and <openssl/crypto.h> declare them.
struct Libcrypto {
  Libcrypto();

  void* (*macFetch)(void* libraryContext, const char* algorithm, const char* properties);
  void* (*contextNew)(void* mac);
  void (*contextFree)(void* context);
  int (*init)(void* context, const unsigned char* key, size_t keyBytes, const OsslParam* params);
  int (*update)(void* context, const unsigned char* data, size_t bytes);
  int (*final)(void* context, unsigned char* out, size_t* written, size_t outBytes);
  OsslParam (*textParam)(const char* key, char* text, size_t bytes);
  OsslParam (*endParam)();
  int (*compare)(const void* left, const void* right, size_t bytes);
  unsigned long (*version)();
  void* hmac = nullptr; // EVP_MAC; lives as long as the process
};

// OpenSSL 3.0.3. Without a key, init() of earlier versions does nothing, where it should start again with the same key
// (openssl#17811). Ubuntu 22.04 has 3.0.2.
constexpr unsigned long kKeepsKeys = 0x30000030;

void* openLibrary() {
  // Prefers a library that the process has already loaded to a newer one on the disk.
  for (const int how : {RTLD_NOLOAD, 0}) {
    for (const char* soname : {"libcrypto.so.4", "libcrypto.so.3"}) {
      if (void* library = dlopen(soname, RTLD_LAZY | RTLD_LOCAL | how)) {
        return library;
      }
    }
  }
  throw std::runtime_error(
      "a job with a secret needs OpenSSL's libcrypto, version 3 or newer, and there is none: install it (Debian, "
      "Ubuntu: apt install libssl3; conda install openssl)");
}

Libcrypto::Libcrypto() {
  void* const library = openLibrary();
  const auto load = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("OpenSSL's libcrypto lacks ") + name + ": install version 3 or newer");
    }
  };
  load(macFetch, "EVP_MAC_fetch");
  load(contextNew, "EVP_MAC_CTX_new");
  load(contextFree, "EVP_MAC_CTX_free");
  load(init, "EVP_MAC_init");
  load(update, "EVP_MAC_update");
  load(final, "EVP_MAC_final");
  load(textParam, "OSSL_PARAM_construct_utf8_string");
  load(endParam, "OSSL_PARAM_construct_end");
  load(compare, "CRYPTO_memcmp");
  load(version, "OpenSSL_version_num");
  hmac = macFetch(nullptr, "HMAC", nullptr);
  if (hmac == nullptr) {
    throw std::runtime_error("OpenSSL's libcrypto offers no HMAC: check its configuration (openssl.cnf)");
  }
}

const Libcrypto& libcrypto() {
  static const Libcrypto library; // if its constructor throws, the next call tries again
  return library;
}

const unsigned char* asChars(const void* bytes) {
  return static_cast<const unsigned char*>(bytes);
}

void check(int succeeded) {
  if (succeeded != 1) {
    throw std::runtime_error("OpenSSL's libcrypto could not compute an HMAC-SHA256: check its configuration");
  }
}

} // namespace

void Hmac::Free::operator()(void* context) const {
  libcrypto().contextFree(context);
}

Hmac::Hmac(std::string_view key) : context_(libcrypto().contextNew(libcrypto().hmac)) {
  char digest[] = "SHA256"; // not const: OpenSSL declares it so, and only reads it
  const OsslParam params[] = {libcrypto().textParam("digest", digest, 0), libcrypto().endParam()};
  check(libcrypto().init(context_.get(), asChars(key.data()), key.size(), params));
  if (libcrypto().version() < kKeepsKeys) {
    key_ = key;
  }
}

Hmac::Tag Hmac::of(std::initializer_list<std::span<const std::byte>> parts) {
  const Libcrypto& library = libcrypto();
  check(library.init(context_.get(), key_.empty() ? nullptr : asChars(key_.data()), key_.size(), nullptr));
  for (const std::span<const std::byte> part : parts) {
    check(library.update(context_.get(), asChars(part.data()), part.size()));
  }
  unsigned char output[32];
  size_t written = 0;
  check(library.final(context_.get(), output, &written, sizeof(output)));
  Tag tag;
  std::copy_n(reinterpret_cast<const std::byte*>(output), tag.size(), tag.begin());
  return tag;
}

bool Hmac::areEqual(const Tag& left, const Tag& right) {
  return libcrypto().compare(left.data(), right.data(), left.size()) == 0;
}

} // namespace torch_ucx_rpc
