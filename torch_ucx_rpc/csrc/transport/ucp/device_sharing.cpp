#include "transport/ucp/device_sharing.h"

#include "transport/ucp/cuda_driver.h"
#include "transport/ucp/ucp_transport.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace torch_ucx_rpc {

namespace {

// Neither torch's nor RMM's allocator takes smaller regions of a device.
constexpr uintptr_t kRegionBytes = 2 * 1024 * 1024;

struct Driver {
  cuda::PointerGetAttributes pointerGetAttributes = nullptr;
  cuda::MemGetAddressRange memGetAddressRange = nullptr;
};

Driver findDriver() {
  // Not loaded here: torch has done that if there are CUDA tensors.
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return {};
  }
  // NOLINTBEGIN(cppcoreguidelines-pro-type-reinterpret-cast)
  return {
      reinterpret_cast<cuda::PointerGetAttributes>(dlsym(library, "cuPointerGetAttributes")),
      reinterpret_cast<cuda::MemGetAddressRange>(dlsym(library, "cuMemGetAddressRange_v2"))};
  // NOLINTEND(cppcoreguidelines-pro-type-reinterpret-cast)
}

// Returns the text in which UCX describes a context. UCX has no other way to tell which transports a context has.
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

bool knowsCuda(ucp_context_h context) {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  return ucp_context_query(context, &attributes) == UCS_OK &&
      (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

} // namespace

bool canShareDeviceMemory(const void* address, uint64_t bytes) {
  static const Driver driver = findDriver();
  if (driver.pointerGetAttributes == nullptr || driver.memGetAddressRange == nullptr) {
    return true;
  }
  unsigned memoryType = 0;
  int isLegacy = 0;
  std::array<int, 2> attributes{cuda::kMemoryType, cuda::kIsLegacyIpcCapable};
  std::array<void*, 2> values{&memoryType, &isLegacy};
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  const auto at = static_cast<cuda::DevicePointer>(reinterpret_cast<uintptr_t>(address));
  if (driver.pointerGetAttributes(attributes.size(), attributes.data(), values.data(), at) != 0 || memoryType == 0) {
    return true;
  }
  if (isLegacy == 0) {
    return false;
  }
  cuda::DevicePointer begin = 0;
  size_t length = 0;
  return driver.memGetAddressRange(&begin, &length, at) != 0 || at + bytes <= begin + length;
}

bool hasCudaIpc(ucp_context_h context) {
  return describe(context).find(" cuda_ipc/") != std::string::npos;
}

Error deviceMemoryRefusal(const UcpLibrary& library, bool hasCuda, bool hasCudaIpc) {
  if (!hasCuda) {
    return {
        ErrorCode::kDeviceFailed,
        "UCX " + library.version + " (" + library.path +
            ") has started without CUDA, and cannot send or receive CUDA tensors. Its CUDA transports need "
            "libcuda.so.1 and libnvidia-ml.so.1 of the driver, and UCX_TLS must not exclude cuda_copy; "
            "UCX_LOG_LEVEL=debug shows why they were not loaded. In a container, NVIDIA_DRIVER_CAPABILITIES must name "
            "compute and utility."};
  }
  if (library.version.starts_with("1.21.") && hasCudaIpc) {
    return {
        ErrorCode::kDeviceFailed,
        "UCX " + library.version +
            " cannot be used for CUDA tensors: its cuda_ipc is broken (https://github.com/rapidsai/ucxx/pull/734). "
            "Install UCX 1.22 or later, or 1.20, or set UCX_TLS=^cuda_ipc."};
  }
  return {};
}

Error deviceMemoryMistaken(ucp_context_h context, const void* address, uint64_t bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = const_cast<void*>(address); // NOLINT(cppcoreguidelines-pro-type-const-cast): as UCX declares it
  params.length = bytes;
  ucp_mem_h handle = nullptr;
  if (ucp_mem_map(context, &params, &handle) != UCS_OK) {
    return {}; // the operation itself will show what is wrong
  }
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  const bool isMistaken = ucp_mem_query(handle, &attributes) == UCS_OK && attributes.mem_type == UCS_MEMORY_TYPE_HOST;
  (void)ucp_mem_unmap(context, handle);
  if (!isMistaken) {
    return {};
  }
  return {
      ErrorCode::kDeviceFailed,
      "UCX " + loadedUcpLibrary().version +
          " takes memory of a CUDA device for the host's, since its cache of allocations has missed it. Set "
          "UCX_MEMTYPE_CACHE=n."};
}

DeviceMemoryAccess::DeviceMemoryAccess(ucp_context_h context)
    : context_(context),
      hasCudaIpc_(torch_ucx_rpc::hasCudaIpc(context)),
      refusal_(deviceMemoryRefusal(loadedUcpLibrary(), knowsCuda(context), hasCudaIpc_)) {}

const Error& DeviceMemoryAccess::refusalOf(const void* address, uint64_t bytes) {
  if (refusal_) {
    return refusal_;
  }
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  const uintptr_t region = reinterpret_cast<uintptr_t>(address) / kRegionBytes;
  mistaken_ = {};
  if (bytes != 0 && !knownRegions_.contains(region)) {
    mistaken_ = deviceMemoryMistaken(context_, address, bytes);
    if (!mistaken_) {
      knownRegions_.insert(region);
    }
  }
  return mistaken_;
}

} // namespace torch_ucx_rpc
