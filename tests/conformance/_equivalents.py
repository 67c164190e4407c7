"""PyTorch's tests that demand TensorPipe by name, or its limits, and this project's tests of the same subjects."""

from __future__ import annotations

# "Suite.test" -> why UCX cannot pass it, and the pytest node with the same subject.
EQUIVALENTS: dict[str, dict[str, str]] = {
    "TensorPipeAgentRpcTest.test_infer_backend_from_options": {
        "reason": "asserts that the agent is an instance of TensorPipeAgent",
        "equivalent": "tests/e2e/test_replace.py::test_the_backend_is_inferred_from_options_for_tensorpipe",
    },
    "TensorPipeAgentCudaRpcTest.test_device_maps_many_to_one": {
        "reason": "asks that several devices cannot be mapped to one",
        "equivalent": "tests/unit/test_device_maps.py::test_several_devices_may_map_to_one_and_to_the_cpu",
    },
}
