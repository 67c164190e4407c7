"""The inside of a worker process of a job: its instructions and their execution."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import sys
import traceback
import warnings
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc

from tests.support.labs import move_to_host

from ._processes import dump_stacks_on_request

# Warnings of torch that begin like this are not errors in tests: they are about features that must still work.
ACCEPTED_WARNINGS = (
    r"`torch\.jit\.\w+` is (deprecated|not supported in Python 3\.14)",
    "torch.quantize_per_tensor, torch.quantize_per_channel",
    "B?Complex(Half|32) support is experimental",
    "Sparse CSR tensor support is in beta state",
    "Sparse invariant checks are implicitly disabled",
)
# Warnings from these packages are accepted. The pattern matches the name of the module that warns.
FOREIGN_MODULES = r"(cuda|cupy|cupyx|cupy_backends|numba|numba_cuda|rmm)(\..*)?$"


class Transport(Enum):
    """The transports between the workers of a job.

    SHARED_MEMORY leaves the choice to UCX, so virtual hosts are joined by TCP.
    """

    SHARED_MEMORY = "shared memory"
    TCP = "tcp"


def worker_name(rank: int) -> str:
    return f"worker{rank}"


def init_rpc(rank: int, **overrides: Any) -> None:
    """Join the job that `run_workers` started this process for; ``overrides`` are arguments of ``rpc.init_rpc``."""
    this_worker().init_rpc(rank, overrides)


def backend_options(**options: object) -> rpc.RpcBackendOptions:
    """Return an options object of this job's backend for `init_rpc`, made only from ``options``."""
    return this_worker().backend_options(options)


def agent() -> rpc.RpcAgent:
    """This process's running agent."""
    return rpc.api._get_current_rpc_agent()


def this_worker() -> Worker:
    assert _this_worker is not None, "only processes started by run_workers are workers"
    return _this_worker


_this_worker: Worker | None = None


@dataclasses.dataclass(frozen=True)
class Worker:
    """The arguments of `run_workers` that each of its processes needs."""

    world_size: int
    backend: str
    transport: Transport
    host_pids: tuple[int, ...]
    options: dict[str, object]
    env: dict[str, str]
    init: bool
    shutdown: bool
    directory: Path
    call: bytes

    def output_file(self, rank: int, stream: str) -> Path:
        return self.directory / f"{worker_name(rank)}.{stream}"

    def main(self, rank: int, report: Connection) -> None:
        """Run the body and report ``(True, its result)`` or ``(False, traceback)``. This is the process's entry
        point."""
        global _this_worker
        _this_worker = self
        try:
            if self.host_pids:
                move_to_host(self.host_pids[rank % len(self.host_pids)])
            self._set_up_process(rank)
            # The import of the test's module may load UCX, so the environment comes first.
            body, args = pickle.loads(self.call)
            if self.init:
                self.init_rpc(rank, {})
            result = body(rank, *args)
            if self.shutdown:
                rpc.shutdown()
            report.send_bytes(pickle.dumps((True, result)))
        except BaseException:
            report.send_bytes(pickle.dumps((False, traceback.format_exc())))
            # The report is sent, and the agent may be in any state: leave at once.
            os._exit(1)

    def init_rpc(self, rank: int, overrides: dict[str, Any]) -> None:
        arguments = {
            "name": worker_name(rank),
            "backend": rpc.backend_registry.BackendType[self.backend],
            "rank": rank,
            "world_size": self.world_size,
            **overrides,
        }
        if "rpc_backend_options" not in arguments:
            arguments["rpc_backend_options"] = self.backend_options(self.options)
        rpc.init_rpc(**arguments)

    def backend_options(self, options: dict[str, object]) -> rpc.RpcBackendOptions:
        if self.backend == "UCX":
            import torch_ucx_rpc

            return torch_ucx_rpc.UcxRpcBackendOptions(**options)
        # A thread polls TensorPipe's shared memory all the time, and would take the cores from other tests.
        return rpc.TensorPipeRpcBackendOptions(_transports=["uv"], **options)

    def _set_up_process(self, rank: int) -> None:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            stream.flush()
            file = os.open(self.output_file(rank, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, stream.fileno())
            os.close(file)
        dump_stacks_on_request(self.directory)
        signal.signal(signal.SIGINT, signal.default_int_handler)

        # A developer's variables must not change the test.
        for variable in [name for name in os.environ if name.startswith(("UCX_", "TORCH_UCX_RPC_"))]:
            del os.environ[variable]
        if self.transport is Transport.TCP:
            os.environ["UCX_TLS"] = "tcp,self,cuda_copy" if torch.cuda.is_available() else "tcp,self"
        os.environ.update(self.env)

        torch.set_num_threads(1)
        torch.manual_seed(rank)  # torch begins with a random seed, and a test must not depend on it
        # A leaked RRef then fails the shutdown, as in PyTorch's own tests.
        rpc.api._ignore_rref_leak = False
        _explain_failed_assertions()
        if self.backend == "UCX":
            import torch_ucx_rpc  # noqa: F401 - registers the backend

            warnings.simplefilter("error")
            for message in ACCEPTED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            warnings.filterwarnings("ignore", module=FOREIGN_MODULES)


def _explain_failed_assertions() -> None:
    """Let ``assert a == b`` in a test's module show the values, as in the pytest process."""
    import _pytest.assertion
    import _pytest.config

    _pytest.assertion.install_importhook(_pytest.config.get_config())
