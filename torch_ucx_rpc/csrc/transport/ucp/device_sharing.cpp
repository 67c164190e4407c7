#include "transport/ucp/device_sharing.h"

#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <array>
#include <cstdint>

namespace torch_ucx_rpc {

namespace {

// Of CUDA's driver API (cuda.h), whose values never change.
using CUresult = int;
using CUdeviceptr = unsigned long long; // NOLINT(google-runtime-int): as declared there
using PointerGetAttributes = CUresult (*)(unsigned count, int* attributes, void** values, CUdeviceptr address);
constexpr int kIsLegacyIpcCapable = 10; // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: an int
constexpr int kAllowedHandleTypes = 14; // CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: 64 bits
constexpr uint64_t kPosixFileDescriptor = 0x1; // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr uint64_t kFabric = 0x8; // CU_MEM_HANDLE_TYPE_FABRIC

PointerGetAttributes findDriver() {
  void* const driver =
      dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); // torch has loaded it, if there are CUDA tensors
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  return driver == nullptr ? nullptr : reinterpret_cast<PointerGetAttributes>(dlsym(driver, "cuPointerGetAttributes"));
}

// As uct_cuda_ipc_mem_add_reg() has it in src/uct/cuda/cuda_ipc/cuda_ipc_md.c.
uint64_t handleTypesOfUcx() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  return major > 1 || minor >= 22 ? kPosixFileDescriptor | kFabric : kFabric;
}

} // namespace

bool canShareDeviceMemory(const void* address) {
  static const PointerGetAttributes pointerGetAttributes = findDriver();
  static const uint64_t handleTypes = handleTypesOfUcx();
  if (pointerGetAttributes == nullptr) {
    return true;
  }
  int isLegacy = 0;
  uint64_t allowed = 0;
  std::array<int, 2> attributes{kIsLegacyIpcCapable, kAllowedHandleTypes};
  std::array<void*, 2> values{&isLegacy, &allowed};
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  const auto at = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(address));
  if (pointerGetAttributes(attributes.size(), attributes.data(), values.data(), at) != 0) {
    return true;
  }
  return isLegacy != 0 || (allowed & handleTypes) != 0;
}

} // namespace torch_ucx_rpc
