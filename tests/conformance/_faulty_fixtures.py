"""The fixtures that PyTorch's suites for a faulty agent need, for each backend.

They are not in _fixtures.py because the import of torch's fixture registers a backend. That replaces the enum of
backends, and then rpc.BackendType can no longer infer a backend from options.
"""

from __future__ import annotations

import torch.distributed.rpc as rpc
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture

from ._processes import PreloadedProcesses


class FaultyUcxFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's fixture, with UCX's faulty backend under the name that the tests use."""

    @property
    def rpc_backend(self) -> rpc.BackendType:
        import torch_ucx_rpc.testing  # noqa: F401 - registers the backend

        backend = super().rpc_backend
        backend._value_ = rpc.backend_registry.BackendType["FAULTY_UCX"].value
        return backend


class FaultyTensorPipeFixture(PreloadedProcesses, FaultyRpcAgentTestFixture):
    """torch's fixture."""


FAULTY_FIXTURES = {"UCX": FaultyUcxFixture, "TENSORPIPE": FaultyTensorPipeFixture}
