"""Contenders: RPC jobs on UCX and on TensorPipe, and functions such as a memcpy.

The jobs of a benchmark exist at the same time. While one is measured, the others are stopped (SIGSTOP): an idle worker
on TensorPipe spins and would take a core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Benchmark, Bound, ContenderFailed, Figures

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch._C._distributed_rpc import RpcBackendOptions


@dataclasses.dataclass(frozen=True)
class Transport:
    """A backend and the transport that it must use between workers."""

    name: str
    backend: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # A pattern of the lanes to another worker. TensorPipe does not report lanes.
    lanes: str = ""
    # The workers import the package of this other checkout, which is built in place.
    tree: str = ""

    def rpc_backend_options(self, **more: Any) -> RpcBackendOptions:
        if self.backend == "UCX":
            from torch_ucx_rpc import UcxRpcBackendOptions

            return UcxRpcBackendOptions(**self.options, **more)
        from torch.distributed.rpc import TensorPipeRpcBackendOptions

        return TensorPipeRpcBackendOptions(**self.options, **more)


UCX = Transport("UCX", "UCX", lanes="sysv|posix")
TENSORPIPE = Transport("TensorPipe", "TENSORPIPE")
UCX_TCP = Transport("UCX, tcp", "UCX", environment={"UCX_TLS": "tcp,self"}, lanes=r"(?!.*(sysv|posix)).*tcp")
# TensorPipe without the transport and the channel for one host (shm, cma), as between hosts. mpt_uv sends large tensors
# over several connections. Without mpt_uv the echo of 64 MiB takes 1.2 to 1.3 times as long.
TENSORPIPE_UV = Transport(
    "TensorPipe, uv", "TENSORPIPE", options={"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
)
# On one host either transport of TensorPipe may be faster.
ON_ONE_HOST = (UCX, TENSORPIPE, TENSORPIPE_UV)
TRANSPORTS = (UCX, TENSORPIPE, UCX_TCP, TENSORPIPE_UV)


def over_tcp(must: float, aim: float | None = None) -> Bound:
    """Return the bound of UCX over TCP against TensorPipe over TCP."""
    return Bound(must, aim, contender=UCX_TCP.name, reference=TENSORPIPE_UV.name)


PROCESSES = multiprocessing.get_context("forkserver")
# Workers have these modules before they start, so importing the benchmarks' own modules counts for no contender.
PRELOADED = ("torch.distributed.rpc", "benchmarks.many_workers")
PROCESSES.set_forkserver_preload([*PRELOADED])


# The limits for workers to meet and for a round, and for the end of a job.
LIMIT_S = 180.0
_END_S = 20.0


# The lanes of the contenders' messages, if they report them.
LANES: dict[str, str] = {}


def _work(
    rank: int,
    workers: int,
    transport: Transport,
    store: str,
    measure: Callable[[], Figures],
    turns: Any,
    is_over: Any,
) -> None:
    """The body of a worker. Only worker0 has ``turns``, a pipe whose end shows that worker0 is gone.

    ``is_over`` is for jobs that kill workers: it says when the job ends.
    """
    try:
        os.environ.update(transport.environment)
        import torch
        import torch.distributed.rpc as rpc
        from torch._C._distributed_rpc import _get_current_rpc_agent

        torch.set_num_threads(1)
        if transport.backend == "UCX":
            if transport.tree:
                sys.path.insert(0, transport.tree)
            import torch_ucx_rpc  # makes "UCX" a backend

            assert torch_ucx_rpc.__file__.startswith(transport.tree), f"{torch_ucx_rpc.__file__} is of another tree"
        rpc.init_rpc(
            f"worker{rank}",
            backend=rpc.BackendType[transport.backend],
            rank=rank,
            world_size=workers,
            rpc_backend_options=transport.rpc_backend_options(init_method=store),
        )
        if rank == 0:
            turns.send(("ready", None))
            while turns.recv() == "measure":
                figures = measure()
                lanes = _get_current_rpc_agent().get_debug_info().get("lanes.worker1", "")
                turns.send(("figures", (figures, lanes)))
        # A graceful shutdown would end as soon as a worker has died, in the middle of the job.
        if is_over is not None:
            is_over.poll(None)
        rpc.shutdown(graceful=is_over is None)
    except BaseException:
        if turns is not None:
            turns.send(("failed", traceback.format_exc()))
        raise


class RpcJob:
    """Workers on this machine, named worker0, worker1 and so on. ``measure`` runs on worker0, and may kill other
    workers."""

    def __init__(
        self,
        transport: Transport,
        measure: Callable[[], Figures],
        *,
        workers: int = 2,
        limit_s: float = LIMIT_S,
        kills: bool = False,
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._measure = measure
        self._workers = workers
        self._limit_s = limit_s
        self._kills = kills
        self._has_failed = False

    @property
    def transport(self) -> Transport:
        return self._transport

    def afresh(self, transport: Transport) -> FreshRpcJob:
        """Return the same job on this transport, with new processes every round."""
        return FreshRpcJob(transport, self._measure, workers=self._workers, limit_s=self._limit_s, kills=self._kills)

    def __enter__(self) -> RpcJob:
        self._folder = tempfile.TemporaryDirectory()
        self._turns, theirs = PROCESSES.Pipe()
        is_over: Connection | None
        self._is_over: Connection | None
        self._is_over, is_over = PROCESSES.Pipe() if self._kills else (None, None)
        store = Path(self._folder.name, "store").as_uri()
        self._has_failed = False
        self._processes = [
            PROCESSES.Process(
                target=_work,
                args=(
                    rank,
                    self._workers,
                    self._transport,
                    store,
                    self._measure,
                    theirs if rank == 0 else None,
                    is_over,
                ),
                daemon=True,
            )
            for rank in range(self._workers)
        ]
        for process in self._processes:
            process.start()
        theirs.close()
        if is_over is not None:
            is_over.close()
        try:
            self._receive("ready")
        except ContenderFailed:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def measure(self) -> Figures:
        self._signal(signal.SIGCONT)
        self._turns.send("measure")
        figures: Figures
        figures, lanes = self._receive("figures")
        if lanes and not re.search(self._transport.lanes, lanes):
            raise self._failure(f"its messages go by {lanes}")
        if lanes:
            LANES[self.name] = lanes
        self._signal(signal.SIGSTOP)
        return figures

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)
        if not self._has_failed:
            with contextlib.suppress(BrokenPipeError):
                self._turns.send("end")
        self._end()

    def _receive(self, expected: str) -> Any:
        try:
            if not self._turns.poll(self._limit_s):
                raise self._failure(f"worker0 has not answered in {self._limit_s:g} s")
            kind, content = self._turns.recv()
        except (EOFError, ConnectionError) as error:
            raise self._failure("worker0 has died") from error
        if kind != expected:
            raise self._failure(content)
        return content

    def _failure(self, reason: str) -> ContenderFailed:
        """Kill the job's workers, which would take time from other contenders, and return the error."""
        self._has_failed = True
        for process in self._processes:
            process.kill()
        return ContenderFailed(reason)

    def _end(self) -> None:
        if self._is_over is not None:
            self._is_over.close()
        give_up_at = time.monotonic() + (0.0 if self._has_failed else _END_S)
        for process in self._processes:
            process.join(timeout=max(0.0, give_up_at - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._turns.close()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


class FreshRpcJob:
    """An `RpcJob` with new processes every round, to measure effects of the first time."""

    def __init__(
        self,
        transport: Transport,
        measure: Callable[[], Figures],
        *,
        workers: int = 2,
        limit_s: float = LIMIT_S,
        kills: bool = False,
    ) -> None:
        self.name = transport.name
        self._job = RpcJob(transport, measure, workers=workers, limit_s=limit_s, kills=kills)

    def __enter__(self) -> FreshRpcJob:
        return self

    def measure(self) -> Figures:
        with self._job:
            return self._job.measure()

    def __exit__(self, *exception: object) -> None:
        pass


class Baseline:
    """A function that measures in this process, or in a process that it starts."""

    def __init__(self, name: str, measure: Callable[[], Figures]) -> None:
        self.name = name
        self.measure = measure

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def against(benchmark: Benchmark, tree: Path) -> Benchmark:
    """Return the benchmark for UCX of this checkout and of another one. It has ratios, without bounds.

    Each round has new processes. How two processes share the machine can change a figure by 15 % for their whole life.
    The differences in question are smaller.
    """
    jobs = [job for job in benchmark.contenders() if isinstance(job, RpcJob) and job.transport.backend == "UCX"]
    here = [job.afresh(job.transport) for job in jobs]
    there = [
        job.afresh(dataclasses.replace(job.transport, name=f"{job.name}, {tree.name}", tree=str(tree))) for job in jobs
    ]
    bounds = tuple(
        Bound(None, contender=mine.name, reference=other.name) for mine, other in zip(here, there, strict=True)
    )
    figures = tuple(dataclasses.replace(figure, bounds=bounds) for figure in benchmark.figures)
    return dataclasses.replace(benchmark, figures=figures, contenders=lambda: [*here, *there])
