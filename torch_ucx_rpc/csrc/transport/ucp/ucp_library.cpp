#include "transport/ucp/ucp_library.h"

#include "transport/ucp/ucp_transport.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace torch_ucx_rpc {

namespace {

// Gives UCX's status codes their meaning.
ErrorCode codeOf(ucs_status_t status) {
  switch (status) {
    case UCS_OK:
    case UCS_INPROGRESS:
      return ErrorCode::kOk;
    case UCS_ERR_CANCELED:
      return ErrorCode::kCanceled;

    // This process or machine.
    case UCS_ERR_NO_MEMORY:
      return ErrorCode::kOutOfMemory;
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_BUSY:
    case UCS_ERR_SHMEM_SEGMENT:
    case UCS_ERR_EXCEEDS_LIMIT:
      return ErrorCode::kOutOfResources;

    // The peer, or the way to it. An input or output error concerns a connection or a card.
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_ENDPOINT_TIMEOUT:
      return ErrorCode::kTimedOut;
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_SOME_CONNECTS_FAILED:
    case UCS_ERR_FIRST_LINK_FAILURE:
    case UCS_ERR_LAST_LINK_FAILURE:
    case UCS_ERR_FIRST_ENDPOINT_FAILURE:
    case UCS_ERR_LAST_ENDPOINT_FAILURE:
      return ErrorCode::kPeerFailed;

    // Other versions have further link and endpoint failures. Any other code means that this package misused UCX.
    default:
      return UCS_IS_LINK_ERROR(status) || UCS_IS_ENDPOINT_ERROR(status) ? ErrorCode::kPeerFailed : ErrorCode::kInternal;
  }
}

std::string textOf(ucs_status_t status) {
  return std::string("UCX: ") + ucs_status_string(status);
}

const char* userSetting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The groups of transports that matter here, as ucp_tl_aliases[] has them in UCX 1.14 to 1.22. The names of
// InfiniBand's reliable connections also bring the transport that sets them up.
struct TransportGroup {
  std::string_view name;
  std::vector<std::string_view> members;
};
const std::vector<TransportGroup>& transportGroups() {
  static const auto* const groups = new std::vector<TransportGroup>{
      {"mm", {"posix", "sysv", "xpmem"}},
      {"sm", {"posix", "sysv", "xpmem", "knem", "cma"}},
      {"shm", {"posix", "sysv", "xpmem", "knem", "cma"}},
      {"rc", {"rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5"}},
      {"rc_v", {"rc_verbs", "ud_verbs"}},
      {"rc_x", {"rc_mlx5", "ud_mlx5"}},
      {"ud", {"ud_verbs", "ud_mlx5"}},
      {"ud_v", {"ud_verbs"}},
      {"ud_x", {"ud_mlx5"}},
      {"dc", {"dc_mlx5", "ud_mlx5"}},
      {"dc_x", {"dc_mlx5", "ud_mlx5"}},
      {"ib", {"rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5"}},
  };
  return *groups;
}

// The words of UCX_TLS.
std::vector<std::string> wordsOf(const std::string& tls) {
  std::vector<std::string> words;
  std::istringstream list(tls.starts_with('^') ? tls.substr(1) : tls);
  for (std::string word; std::getline(list, word, ',');) {
    word.erase(
        std::remove_if(word.begin(), word.end(), [](unsigned char c) { return std::isspace(c) != 0; }), word.end());
    if (!word.empty()) {
      words.push_back(word);
    }
  }
  return words;
}

// True if the word of UCX_TLS means the transport.
bool means(std::string_view word, std::string_view transport) {
  word = word.substr(0, word.find(':')); // "ud:aux" is for connecting only, which suffices here
  if (word.starts_with('\\')) { // only the transport of that name, even if a group has that name too
    return word.substr(1) == transport;
  }
  return word == "all" || word == transport ||
      std::any_of(transportGroups().begin(), transportGroups().end(), [&](const TransportGroup& group) {
           return group.name == word &&
               std::find(group.members.begin(), group.members.end(), transport) != group.members.end();
         });
}

// Advice for a UCX that cannot start. UCX has logged its own reason before.
const char* cureOf(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_SHMEM_SEGMENT:
    case UCS_ERR_IO_ERROR:
      return "This machine has run out of something that UCX's line above names. Check df /dev/shm, ipcs -l -u, free "
             "and ulimit -a.";
    default:
      return "If UCX_TLS or UCX_NET_DEVICES is set, check that it names transports and devices of this machine "
             "(python -m torch_ucx_rpc info lists them).";
  }
}

// Sets what the user has not set (UCX_* variables are the user's). A default of some transports is set only if UCX_TLS
// allows one of them: UCX 1.18 to 1.20 warn of settings that nothing has used.
void applyDefaults(ucp_config_t* config, const std::string& networkDevices) {
  struct Default {
    const char* name;
    const char* value;
    std::vector<const char*> transports; // empty: UCX's own setting
  };
  const Default defaults[] = {
      // Endpoints must report dead peers (UCP_ERR_HANDLING_MODE_PEER). Without this setting UCX would use TCP for that,
      // even on one host.
      {"MM_ERROR_HANDLING", "y", {"posix", "sysv", "xpmem"}},
      // The number of buffers that a worker makes at a time for each kind of shared memory. UCX's default is 512
      // buffers of 8 KiB. UCX writes to each of them, though its queue has only 256 slots. That takes twice as much
      // memory, and a tenth of the time of init_rpc.
      {"MM_RX_BUFS_GROW", "288", {"posix", "sysv", "xpmem"}},
      {"NET_DEVICES", networkDevices.c_str(), {}},
      // UCX's defaults are 8 and 64 KiB. An echo of 64 MiB over loopback takes 33 ms with these values, and 135 ms with
      // the defaults.
      {"TCP_TX_SEG_SIZE", "64k", {"tcp"}},
      {"TCP_RX_SEG_SIZE", "256k", {"tcp"}},
      // Connecting does not block. Otherwise the first call to a host that is down would hold the worker for as long as
      // the kernel tries. That is two minutes, and all other calls would wait too.
      {"TCP_CONN_NB", "y", {"tcp"}},
      // Never, in effect. Every 20 s UCX would read /proc/<pid>/stat of neighbours. If this process can open no more
      // files, UCX would take a neighbour for dead. PeerMonitor watches all peers. Sockets have keepalive settings of
      // their own. "inf" would also change how UCX chooses lanes.
      {"KEEPALIVE_INTERVAL", "36000000s", {}},
  };
  const std::string tls = userSetting("UCX_TLS");
  for (const Default& item : defaults) {
    const bool isUsed = item.transports.empty() ||
        std::any_of(item.transports.begin(), item.transports.end(), [&](const char* transport) {
                          return allowsTransport(tls, transport);
                        });
    if (isUsed && *item.value != '\0' && std::getenv((std::string("UCX_") + item.name).c_str()) == nullptr) {
      check(ucp_config_modify(config, item.name, item.value), "configuring UCX");
    }
  }
}

// A connection takes up to this many files: a socket on each of two lanes, a timer, and shared memory while UCX
// attaches it.
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

bool allowsTransport(const std::string& tls, const std::string& transport) {
  const std::vector<std::string> words = wordsOf(tls);
  const bool isNamed =
      std::any_of(words.begin(), words.end(), [&](const std::string& word) { return means(word, transport); });
  return words.empty() || (tls.starts_with('^') ? !isNamed : isNamed);
}

std::string whatIsLackingToConnect(const std::string& tls) {
  const auto isAllowed = [&](const char* transport) { return allowsTransport(tls, transport); };
  constexpr std::array<const char*, 3> kReliable = {"rc_verbs", "rc_mlx5", "dc_mlx5"}; // set up over another transport
  constexpr std::array<const char*, 3> kConnecting = {"ud_verbs", "ud_mlx5", "tcp"};
  const auto* const reliable = std::find_if(kReliable.begin(), kReliable.end(), isAllowed);
  if (reliable == kReliable.end() || std::any_of(kConnecting.begin(), kConnecting.end(), isAllowed)) {
    return "";
  }
  const std::string name(*reliable);
  return "UCX_TLS=" + tls + " has no transport over which " + name + " could set a connection up: say " +
      name.substr(0, name.find('_')) + " instead of " + name;
}

Error errorOf(ucs_status_t status) {
  return codeOf(status) == ErrorCode::kOk ? Error() : Error(codeOf(status), textOf(status));
}

Error errorOfConnecting(ucs_status_t status) {
  if (status == UCS_ERR_UNREACHABLE) {
    const std::string lack = whatIsLackingToConnect(userSetting("UCX_TLS"));
    return {ErrorCode::kPeerFailed, textOf(status) + (lack.empty() ? "" : ". " + lack)};
  }
  // UCX connects later, so no peer can have caused this. UCX could not make a socket or a queue pair.
  return status == UCS_ERR_IO_ERROR ? Error(ErrorCode::kOutOfResources, textOf(status)) : errorOf(status);
}

Error errorOfEndpoint(ucs_status_t status, int someFile) {
  // UCX also says "input/output error" if it could not open a socket. It says "endpoint timeout" if that leaves a
  // connection without a way to send (proto_reconfig.c). If this process can open no file now, that is why.
  if (status == UCS_ERR_IO_ERROR || status == UCS_ERR_ENDPOINT_TIMEOUT) {
    if (Error files = filesForAConnection(someFile)) {
      return files;
    }
  }
  // Here "canceled" does not mean that this side has given up. An InfiniBand card reports it for all operations of a
  // broken connection, and the real reason may come later (uct_ib_wc_to_ucs_status()).
  if (status == UCS_ERR_CANCELED) {
    return {ErrorCode::kPeerFailed, "the connection has broken (" + textOf(status) + ")"};
  }
  return errorOf(status);
}

std::string workerAddress(ucp_worker_h worker, uint32_t flags) {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = flags;
  check(ucp_worker_query(worker, &attributes), "getting UCX's worker address");
  std::string address(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucp_worker_release_address(worker, attributes.address);
  return address;
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
