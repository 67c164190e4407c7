#include "transport/ucp/ucp_library.h"

#include "transport/ucp/ucp_transport.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <stdexcept>

namespace torch_ucx_rpc {

namespace {

// The only place where UCX's status codes are given a meaning.
ErrorCode codeOf(ucs_status_t status) {
  switch (status) {
    case UCS_OK:
      return ErrorCode::kOk;
    case UCS_ERR_CANCELED:
      return ErrorCode::kCanceled;
    case UCS_ERR_NO_MEMORY:
      return ErrorCode::kOutOfMemory;
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_ENDPOINT_TIMEOUT:
      return ErrorCode::kTimedOut;
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_IO_ERROR:
      return ErrorCode::kPeerFailed;
    default:
      return ErrorCode::kInternal;
  }
}

// What to look at where UCX cannot start. It tells its own reason on stderr, before.
const char* cureOf(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_SHMEM_SEGMENT:
    case UCS_ERR_IO_ERROR:
      return "Something is used up, of which UCX's line above this tells more: look at df /dev/shm, ipcs -l -u, free and "
             "ulimit -a.";
    default:
      return "If UCX_TLS or UCX_NET_DEVICES is set, check that it names transports and devices of this machine "
             "(python -m torch_ucx_rpc info lists them).";
  }
}

// What we set where the user has set nothing (UCX_* variables are the user's).
void applyDefaults(ucp_config_t* config, const std::string& networkDevices) {
  struct Default {
    const char* name;
    const char* value;
  };
  const Default defaults[] = {
      // Endpoints report dead peers (UCP_ERR_HANDLING_MODE_PEER). Without this, UCX then takes TCP even on one host.
      {"MM_ERROR_HANDLING", "y"},
      {"NET_DEVICES", networkDevices.c_str()},
      // UCX's own are 8 and 64 KiB. An echo of 64 MiB over loopback takes 33 ms with these and 135 with those.
      {"TCP_TX_SEG_SIZE", "64k"},
      {"TCP_RX_SEG_SIZE", "256k"},
      // Connecting does not block. Otherwise the first call to a host that is down holds the worker for as long as the kernel tries, two
      // minutes, and with it all other calls.
      {"TCP_CONN_NB", "y"},
  };
  for (const Default& item : defaults) {
    if (*item.value != '\0' && std::getenv((std::string("UCX_") + item.name).c_str()) == nullptr) {
      check(ucp_config_modify(config, item.name, item.value), "configuring UCX");
    }
  }
}

// A connection takes up to this many files: a socket on each of two lanes, a timer, and some shared memory while it is attached.
constexpr size_t kFilesOfAConnection = 4;

} // namespace

UcpLibrary loadedUcpLibrary() {
  UcpLibrary library{ucp_get_version_string(), ""};
  library.version = library.version.substr(0, library.version.find(' '));
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&ucp_get_version_string), &info) != 0 && info.dli_fname != nullptr) {
    library.path = info.dli_fname;
  }
  return library;
}

std::string ucpHeaderVersion() {
  return std::to_string(UCP_API_MAJOR) + "." + std::to_string(UCP_API_MINOR);
}

ucp_context_h startUcx(size_t expectedPeers, const std::string& networkDevices) {
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "reading UCX's configuration");
  const std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> configOwner(config, &ucp_config_release);
  applyDefaults(config, networkDevices);

  ucp_params_t contextParams{};
  contextParams.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_NAME;
  contextParams.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  contextParams.estimated_num_eps = expectedPeers;
  contextParams.name = "torch_ucx_rpc";
  ucp_context_h context = nullptr;
  check(ucp_init(&contextParams, config, &context), "starting UCX");
  return context;
}

Error errorOf(ucs_status_t status) {
  return status == UCS_OK ? Error() : Error(codeOf(status), std::string("UCX: ") + ucs_status_string(status));
}

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string(what) + " failed: " + ucs_status_string(status) + ". " + cureOf(status));
  }
}

Error filesForAConnection(int someFile) {
  std::array<int, kFilesOfAConnection> files{};
  for (int& file : files) {
    file = fcntl(someFile, F_DUPFD_CLOEXEC, 0);
  }
  const bool isEnough = files.back() >= 0;
  for (const int file : files) {
    if (file >= 0) {
      ::close(file);
    }
  }
  if (isEnough) {
    return {};
  }
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  return {
      ErrorCode::kOutOfFiles,
      "this process has too many files open for another connection (" + std::to_string(limit.rlim_cur) +
          " are allowed); raise the limit of open files (ulimit -n)"};
}

} // namespace torch_ucx_rpc
