"""Answers to the questions of PyTorch's suites for a faulty agent, for each backend.

These are apart from the other fixtures because the import of torch's own registers a backend. That replaces the enum of
backends, and then a process cannot infer a backend from options by rpc.BackendType.
"""

from __future__ import annotations

import torch.distributed.rpc as rpc
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture

from ._processes import PreloadedProcesses


class FaultyUcxFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's own answers, with UCX's faulty backend under the name of torch's, which tests ask for."""

    @property
    def rpc_backend(self) -> rpc.BackendType:
        import torch_ucx_rpc.testing  # noqa: F401 - registers the backend

        backend = super().rpc_backend
        backend._value_ = rpc.backend_registry.BackendType["FAULTY_UCX"].value
        return backend


class FaultyTensorPipeFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's own answers."""


FAULTY_FIXTURES = {"UCX": FaultyUcxFixture, "TENSORPIPE": FaultyTensorPipeFixture}
