// The extension _C: its constants, and functions that concern the process rather than one agent.

#include "base/hmac.h"
#include "bindings/bindings.h"
#include "memory/device_pool.h"
#include "peers/latency_histogram.h"
#include "rpc/profiled_spans.h"
#include "tensors/device_copy.h"
#include "torch_glue/name_lookups.h"
#include "torch_glue/torch_state.h"
#include "transport/ucp/ucp_transport.h"
#include "wire/header.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

// The ends of LatencyHistogram's buckets in nanoseconds. The last bucket has none.
std::vector<int64_t> latencyBucketEnds() {
  std::vector<int64_t> ends;
  for (size_t bucket = 0; bucket + 1 < LatencyHistogram::kBuckets; ++bucket) {
    ends.push_back(LatencyHistogram::endOf(bucket).count());
  }
  return ends;
}

} // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of torch_ucx_rpc; see torch_ucx_rpc/_C.pyi";
  module.attr("BUILT_FOR_TORCH") = TORCH_UCX_RPC_BUILT_FOR_TORCH;
  module.attr("UCP_API_VERSION") = ucpHeaderVersion();
  module.attr("WIRE_VERSION") = static_cast<int>(wire::kVersion);
  module.attr("LATENCY_BUCKET_ENDS_NS") = py::tuple(py::cast(latencyBucketEnds()));
  module.def("ucx_library", [] {
    const UcpLibrary library = loadedUcpLibrary();
    py::dict result;
    result["version"] = library.version;
    result["path"] = library.path;
    return result;
  });

  module.def("spare_name_lookups", &spareNameLookups);
  module.def("name_lookups_spared", &nameLookupsSpared);
  // Throws without libcrypto. Python calls this before any other worker learns of this one.
  module.def("load_libcrypto", [] { Hmac("any"); });

  py::enum_<DevicePool::Source>(module, "DeviceMemorySource")
      .value("torch", DevicePool::Source::kTorch)
      .value("replaced_torch", DevicePool::Source::kReplacedTorch)
      .value("entry_points", DevicePool::Source::kEntryPoints);
  module.def(
      "set_device_pool",
      [](DevicePool::Source source, std::optional<std::pair<uintptr_t, uintptr_t>> entryPoints) {
        DevicePool::EntryPoints functions{};
        if (source == DevicePool::Source::kEntryPoints) {
          // NOLINTBEGIN(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
          functions.allocate = reinterpret_cast<decltype(functions.allocate)>(entryPoints.value().first);
          functions.deallocate = reinterpret_cast<decltype(functions.deallocate)>(entryPoints.value().second);
          // NOLINTEND(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
        }
        DevicePool::instance().setSource(source, functions, &allocatorOf);
      },
      py::arg("source"),
      py::arg("entry_points"));
  module.def("stop_device_pool", [] { DevicePool::instance().stop(); });
  module.def("begin_rref_ids", &beginRRefIds, py::arg("are_random"));
  module.def("begin_context_ids", &beginContextIds, py::arg("rank"), py::arg("are_random"));

  bindErrors(module);
  bindAgents(module);
  bindChannels(module);
  bindNativeOps(module);
  bindTensors(module);
  bindWarnings(module);
  recordSpansInProfilers();
}

} // namespace torch_ucx_rpc
