#include "torch_glue/name_lookups.h"

#include "base/imports.h"

#include <ATen/Parallel.h>

#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <atomic>

namespace torch_ucx_rpc {

namespace {

std::atomic<uint64_t> spared{0};

// In torch's library only the Store asks in this way: gloo sets NI_NUMERICHOST itself.
int getNameInfoForTorch(
    const sockaddr* address,
    socklen_t addressBytes,
    char* host,
    socklen_t hostBytes,
    char* service,
    socklen_t serviceBytes,
    int flags) {
  if (flags == NI_NUMERICSERV) {
    spared.fetch_add(1);
    flags |= NI_NUMERICHOST;
  }
  return ::getnameinfo(address, addressBytes, host, hostBytes, service, serviceBytes, flags);
}

} // namespace

bool spareNameLookups() {
  static const bool areSpared = [] {
    std::array<Import, 1> imports = {{{"getnameinfo", reinterpret_cast<void*>(&getNameInfoForTorch)}}};
    return replaceImports(reinterpret_cast<const void*>(&at::set_num_threads), imports);
  }();
  return areSpared;
}

uint64_t nameLookupsSpared() {
  return spared.load();
}

} // namespace torch_ucx_rpc
