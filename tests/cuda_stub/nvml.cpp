// libnvidia-ml.so.1 of the stub; see cuda_stub.h. UCX asks it for the number of NVLinks.

#include <cstdlib>
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kUnsignedInt = 1; // NVML_VALUE_TYPE_UNSIGNED_INT
constexpr unsigned kNvlinkCount = 91; // NVML_FI_DEV_NVLINK_LINK_COUNT

int theDevice;

// nvmlFieldValue_t
struct FieldValue {
  unsigned field;
  unsigned scope;
  long long timestamp; // NOLINT(google-runtime-int)
  long long latency; // NOLINT(google-runtime-int)
  int type;
  int result;
  unsigned long long value; // NOLINT(google-runtime-int)
};

unsigned nvlinks() {
  const char* const value = std::getenv("CUDA_STUB_NVLINKS");
  return value == nullptr ? 0 : static_cast<unsigned>(std::atoi(value));
}

} // namespace

extern "C" {

int nvmlInit_v2() {
  return kSuccess;
}
int nvmlShutdown() {
  return kSuccess;
}
const char* nvmlErrorString(int /*result*/) {
  return "not supported";
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned /*index*/, void** device) {
  *device = &theDevice;
  return kSuccess;
}
int nvmlDeviceGetPciInfo_v3(void* /*device*/, void* /*info*/) {
  return kNotSupported;
}
int nvmlDeviceGetFieldValues(void* /*device*/, int count, FieldValue* values) {
  for (int index = 0; index < count; ++index) {
    values[index].type = kUnsignedInt;
    values[index].result = values[index].field == kNvlinkCount ? kSuccess : kNotSupported;
    values[index].value = nvlinks();
  }
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* /*device*/, unsigned link, void* /*info*/) {
  return link < nvlinks() ? kSuccess : kNotSupported;
}
int nvmlDeviceGetGpuFabricInfoV(void* /*device*/, void* /*info*/) {
  return kNotSupported;
}
int nvmlDeviceGetGpuFabricInfo(void* /*device*/, void* /*info*/) {
  return kNotSupported;
}

} // extern "C"
