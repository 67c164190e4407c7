#include "transport/ucp/device_sharing.h"

#include "transport/ucp/ucp_transport.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace torch_ucx_rpc {

namespace {

// Of CUDA's driver API (cuda.h), whose values never change.
using CUresult = int;
using CUdeviceptr = unsigned long long; // NOLINT(google-runtime-int): as declared there
using PointerGetAttributes = CUresult (*)(unsigned count, int* attributes, void** values, CUdeviceptr address);
using MemGetAddressRange = CUresult (*)(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address);
constexpr int kMemoryType = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: an unsigned int, 0 for what is not CUDA's
constexpr int kIsLegacyIpcCapable = 10; // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: an int

struct Driver {
  PointerGetAttributes pointerGetAttributes = nullptr;
  MemGetAddressRange memGetAddressRange = nullptr;
};

Driver findDriver() {
  // Not loaded here: torch has done that if there are CUDA tensors.
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return {};
  }
  // NOLINTBEGIN(cppcoreguidelines-pro-type-reinterpret-cast)
  return {
      reinterpret_cast<PointerGetAttributes>(dlsym(library, "cuPointerGetAttributes")),
      reinterpret_cast<MemGetAddressRange>(dlsym(library, "cuMemGetAddressRange_v2"))};
  // NOLINTEND(cppcoreguidelines-pro-type-reinterpret-cast)
}

// UCX has no other way to tell which transports a context has.
std::string describe(ucp_context_h context) {
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* const stream = open_memstream(&text, &bytes);
  if (stream == nullptr) {
    return {};
  }
  ucp_context_print_info(context, stream);
  (void)std::fclose(stream);
  std::string description(text, bytes);
  std::free(text); // NOLINT(cppcoreguidelines-no-malloc, cppcoreguidelines-owning-memory): as open_memstream() asks
  return description;
}

} // namespace

bool canShareDeviceMemory(const void* address, uint64_t bytes) {
  static const Driver driver = findDriver();
  if (driver.pointerGetAttributes == nullptr || driver.memGetAddressRange == nullptr) {
    return true;
  }
  unsigned memoryType = 0;
  int isLegacy = 0;
  std::array<int, 2> attributes{kMemoryType, kIsLegacyIpcCapable};
  std::array<void*, 2> values{&memoryType, &isLegacy};
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  const auto at = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(address));
  if (driver.pointerGetAttributes(attributes.size(), attributes.data(), values.data(), at) != 0 || memoryType == 0) {
    return true;
  }
  if (isLegacy == 0) {
    return false;
  }
  CUdeviceptr begin = 0;
  size_t length = 0;
  return driver.memGetAddressRange(&begin, &length, at) != 0 || at + bytes <= begin + length;
}

bool hasCudaIpc(ucp_context_h context) {
  return describe(context).find(" cuda_ipc/") != std::string::npos;
}

Error deviceMemoryRefusal(ucp_context_h context) {
  const UcpLibrary library = loadedUcpLibrary();
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context, &attributes) != UCS_OK ||
      (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0) {
    return {
        ErrorCode::kDeviceFailed,
        "UCX " + library.version + " (" + library.path +
            ") has started without CUDA, and cannot send or receive CUDA tensors. Its CUDA transports need "
            "libcuda.so.1 and libnvidia-ml.so.1 of the driver, and UCX_TLS must not exclude cuda_copy; "
            "UCX_LOG_LEVEL=debug shows why they were not loaded. In a container, NVIDIA_DRIVER_CAPABILITIES must name "
            "compute and utility."};
  }
  if (library.version.starts_with("1.21.") && hasCudaIpc(context)) {
    return {
        ErrorCode::kDeviceFailed,
        "UCX " + library.version +
            " cannot be used for CUDA tensors: its cuda_ipc is broken (https://github.com/rapidsai/ucxx/pull/734). "
            "Install UCX 1.22 or later, or 1.20, or set UCX_TLS=^cuda_ipc."};
  }
  return {};
}

} // namespace torch_ucx_rpc
