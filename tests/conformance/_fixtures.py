"""The fixtures by which PyTorch's suites get the agent under test, for each backend."""

from __future__ import annotations

from typing import Any

import torch.distributed.rpc as rpc
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

from ._processes import PreloadedProcesses


class UcxFixture(PreloadedProcesses, RpcAgentTestFixture):
    @property
    def rpc_backend(self) -> rpc.BackendType:
        # A test's own process calls this first. Only such processes load UCX.
        import torch_ucx_rpc  # noqa: F401 - registers the backend

        return rpc.backend_registry.BackendType["UCX"]

    @property
    def rpc_backend_options(self) -> rpc.RpcBackendOptions:
        return rpc.backend_registry.construct_rpc_backend_options(self.rpc_backend, init_method=self.init_method)

    def get_shutdown_error_regex(self) -> str:
        return ".*"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"


class TensorPipeFixture(PreloadedProcesses, TensorPipeRpcAgentTestFixture):
    """torch's fixture."""


class UcxForTensorPipeFixture(PreloadedProcesses, TensorPipeRpcAgentTestFixture):
    """torch's fixture, in processes where UCX replaces TensorPipe."""

    @classmethod
    def _run(cls, *arguments: Any, **named: Any) -> None:
        import torch_ucx_rpc

        torch_ucx_rpc.replace_tensorpipe()
        super()._run(*arguments, **named)


# The fixtures for the suites of any agent, and for those of TensorPipe's agent.
FIXTURES = {"UCX": UcxFixture, "TENSORPIPE": TensorPipeFixture}
TENSORPIPE_FIXTURES = {"UCX": UcxForTensorPipeFixture, "TENSORPIPE": TensorPipeFixture}
