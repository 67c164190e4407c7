#include "transport/ucp/ucp_library.h"

#include "transport/ucp/device_sharing.h"
#include "transport/ucp/ucp_transport.h"
#include "transport/ucp/worker_address.h"

#include "ucp_lanes.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <string_view>

namespace torch_ucx_rpc {
namespace {

TEST(UcxTlsTest, NothingSetAllowsEverything) {
  EXPECT_TRUE(allowsTransport("", "tcp"));
  EXPECT_TRUE(allowsTransport("all", "sysv"));
}

TEST(UcxTlsTest, ListsGroupsAndExclusionsFollowUcx) {
  EXPECT_TRUE(allowsTransport("tcp,self", "tcp"));
  EXPECT_FALSE(allowsTransport("tcp,self", "sysv"));
  for (const char* group : {"shm", "sm", "mm", "sysv", "\\sysv", "self, sysv"}) {
    EXPECT_TRUE(allowsTransport(group, "sysv")) << group;
    EXPECT_FALSE(allowsTransport(group, "tcp")) << group;
  }
  EXPECT_TRUE(allowsTransport("shm", "cma"));
  EXPECT_FALSE(allowsTransport("mm", "cma"));
  EXPECT_TRUE(allowsTransport("rc,tcp:aux", "tcp"));
  EXPECT_TRUE(allowsTransport("^tcp", "sysv"));
  EXPECT_FALSE(allowsTransport("^tcp", "tcp"));
  EXPECT_FALSE(allowsTransport("^shm", "posix"));
}

TEST(UcxTlsTest, AMissingAuxiliaryTransportIsReported) {
  EXPECT_NE(whatIsLackingToConnect("rc_verbs,self").find("say rc instead of rc_verbs"), std::string::npos);
  EXPECT_NE(whatIsLackingToConnect("dc_mlx5").find("say dc instead of dc_mlx5"), std::string::npos);
  EXPECT_NE(whatIsLackingToConnect("sysv,rc_mlx5"), "") << "shared memory reaches no other machine";
  for (const char* tls :
       {"", "all", "rc,self", "rc_v", "ib", "rc_verbs,ud_verbs", "rc_verbs,ud:aux", "rc_verbs,tcp", "tcp", "shm"}) {
    EXPECT_EQ(whatIsLackingToConnect(tls), "") << tls;
  }
}

TEST(UcxDevicesTest, AUcxThatCannotHaveDeviceMemoryIsRefusedWithACure) {
  const auto refusal = [](const char* version, bool hasCuda, bool hasCudaIpc) {
    return deviceMemoryRefusal({version, "libucp.so.0"}, hasCuda, hasCudaIpc).message();
  };
  EXPECT_NE(refusal("1.22.0", false, false).find("started without CUDA"), std::string::npos);
  EXPECT_NE(refusal("1.21.0", true, true).find("set UCX_TLS=^cuda_ipc"), std::string::npos);
  EXPECT_EQ(refusal("1.21.0", true, false), "") << "only cuda_ipc is broken there";
  for (const char* version : {"1.20.1", "1.22.0", "1.210.0"}) {
    EXPECT_EQ(refusal(version, true, true), "") << version;
  }
}

TEST(UcxStatusTest, LocalFailuresDifferFromThePeers) {
  for (const ucs_status_t local :
       {UCS_ERR_NO_MEMORY,
        UCS_ERR_NO_RESOURCE,
        UCS_ERR_SHMEM_SEGMENT,
        UCS_ERR_BUSY,
        UCS_ERR_NO_DEVICE,
        UCS_ERR_EXCEEDS_LIMIT,
        UCS_ERR_CANCELED}) {
    EXPECT_TRUE(isLocal(errorOf(local).code())) << ucs_status_string(local);
  }
  for (const ucs_status_t peers :
       {UCS_ERR_CONNECTION_RESET,
        UCS_ERR_ENDPOINT_TIMEOUT,
        UCS_ERR_TIMED_OUT,
        UCS_ERR_UNREACHABLE,
        UCS_ERR_REJECTED,
        UCS_ERR_NOT_CONNECTED,
        UCS_ERR_IO_ERROR,
        static_cast<ucs_status_t>(UCS_ERR_FIRST_ENDPOINT_FAILURE - 3)}) {
    const Error error = errorOf(peers);
    EXPECT_TRUE(error.code() == ErrorCode::kPeerFailed || error.code() == ErrorCode::kTimedOut) << error.message();
    EXPECT_FALSE(isLocal(error.code())) << error.message();
  }
  EXPECT_FALSE(errorOf(UCS_OK));
  EXPECT_FALSE(isLocal(errorOf(UCS_ERR_INVALID_PARAM).code()));
}

TEST(UcxStatusTest, AnInputOutputErrorBeforeAnyPeerIsInvolvedIsLocal) {
  EXPECT_TRUE(isLocal(errorOfConnecting(UCS_ERR_IO_ERROR).code()));
  EXPECT_FALSE(isLocal(errorOfConnecting(UCS_ERR_UNREACHABLE).code()));
}

TEST(UcxStatusTest, EndpointThatFailsForLackOfFilesIsALocalFailure) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_EQ(errorOfEndpoint(UCS_ERR_IO_ERROR, pipes[0]).code(), ErrorCode::kPeerFailed);
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const Error error = errorOfEndpoint(UCS_ERR_IO_ERROR, pipes[0]);
  const Error timeout = errorOfEndpoint(UCS_ERR_ENDPOINT_TIMEOUT, pipes[0]);
  const Error reset = errorOfEndpoint(UCS_ERR_CONNECTION_RESET, pipes[0]);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(error.code(), ErrorCode::kOutOfFiles);
  EXPECT_TRUE(isLocal(error.code()));
  EXPECT_EQ(timeout.code(), ErrorCode::kOutOfFiles) << "with some of its sockets UCX cannot send a large message";
  EXPECT_EQ(reset.code(), ErrorCode::kPeerFailed) << "a reset is the peer's failure, even without files here";
  close(pipes[0]);
  close(pipes[1]);
}

// Otherwise the peer would use another connection. Calls whose answers were lost with this one would wait for ever.
TEST(UcxStatusTest, ConnectionThatACardBreaksCountsAsThePeersFailure) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const Error error = errorOfEndpoint(UCS_ERR_CANCELED, pipes[0]);
  EXPECT_EQ(error.code(), ErrorCode::kPeerFailed);
  EXPECT_NE(error.message().find("the connection has broken"), std::string::npos) << error.message();
  close(pipes[0]);
  close(pipes[1]);
}

TEST(UcxDefaultsTest, UcxAcceptsAllOfThemWithoutAComplaint) {
  for (const char* lanes : {"tcp,self", "shm,self", "sysv,self", "^tcp", "all"}) {
    testing::internal::CaptureStdout(); // where UCX logs
    makeUcpTransportOver(lanes).reset();
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "") << lanes;
  }
}

TEST(WorkerAddressTest, BothAddressesComeOutAsTheyWentIn) {
  const std::string wrapped = wrapAddress({"all transports", "network"});
  EXPECT_EQ(unwrapAddress(wrapped).full, "all transports");
  EXPECT_EQ(unwrapAddress(wrapped).network, "network");
}

TEST(WorkerAddressTest, DamagedOrTruncatedAddressIsEmpty) {
  const std::string wrapped = wrapAddress({"all transports", "network"});
  for (size_t at = 0; at < wrapped.size(); ++at) {
    std::string changed = wrapped;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    EXPECT_TRUE(unwrapAddress(changed).full.empty()) << at;
    EXPECT_TRUE(unwrapAddress(std::string_view(wrapped).substr(0, at)).full.empty()) << at;
  }
  EXPECT_TRUE(unwrapAddress(wrapped + "x").full.empty());
}

} // namespace
} // namespace torch_ucx_rpc
