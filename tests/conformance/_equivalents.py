"""Tests of PyTorch's that ask for TensorPipe by name, and the tests of this project that ask the same of UCX."""

from __future__ import annotations

# "Suite.test" -> why UCX cannot pass it, and the pytest node that holds what it is about.
EQUIVALENTS: dict[str, dict[str, str]] = {
    "TensorPipeAgentRpcTest.test_infer_backend_from_options": {
        "reason": "asserts that the agent is an instance of TensorPipeAgent",
        "equivalent": "tests/test_replace.py::test_the_backend_is_inferred_from_options_for_tensorpipe",
    },
}
