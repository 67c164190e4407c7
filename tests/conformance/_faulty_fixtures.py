"""Answers to the questions of PyTorch's suites for a faulty agent, for each backend.

Apart from the other fixtures, since torch's own, when it is imported, registers a backend: that replaces the enum of
backends, and a process in which rpc.BackendType is no longer the enum in use cannot infer a backend from options.
"""

from __future__ import annotations

import torch.distributed.rpc as rpc
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture

from ._processes import PreloadedProcesses


class FaultyUcxFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's own answers, and under the name of its faulty backend, which tests ask for, the one of UCX."""

    @property
    def rpc_backend(self) -> rpc.BackendType:
        import torch_ucx_rpc.testing  # noqa: F401 - registers the backend

        backend = super().rpc_backend
        backend._value_ = rpc.backend_registry.BackendType["FAULTY_UCX"].value
        return backend


class FaultyTensorPipeFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's own answers."""


FAULTY_FIXTURES = {"UCX": FaultyUcxFixture, "TENSORPIPE": FaultyTensorPipeFixture}
