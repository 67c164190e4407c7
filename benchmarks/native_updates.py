"""How many updates a second does a parameter server apply?

Four clients send gradients of 4 KB to a server. A function on the server adds each gradient to a parameter. It is
either a TorchScript function that calls an operator compiled by numba (`torch_ucx_rpc.native_op`), or a Python
function. Both are measured while the server's Python does nothing else, and while a thread of the server computes in
Python.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from torch_ucx_rpc import native_op

if TYPE_CHECKING:
    import numpy as np

NUMBERS = 1024
CLIENTS = 4
UPDATES, UPDATES_WHILE_BUSY = 500, 50
NATIVE_ON_TENSORPIPE = "TensorPipe, native"
PYTHON = "UCX, Python"


@native_op("benchmarks::accumulate(Tensor(a!) self, Tensor other) -> ()")
def accumulate(self: np.ndarray, other: np.ndarray) -> None:
    for i in range(self.shape[0]):
        self[i] += other[i]


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is")

    @torch.jit.script
    def update(parameter: RRef[Tensor], gradient: Tensor) -> None:
        torch.ops.benchmarks.accumulate(parameter.local_value(), gradient)


def update_in_python(parameter: RRef[Tensor], gradient: Tensor) -> None:
    parameter.local_value().add_(gradient)


class Busy:
    """Keep the server's Python busy by a thread."""

    current: Busy | None = None

    def __init__(self) -> None:
        self.is_ended = False
        self.thread = threading.Thread(target=self.count)
        self.thread.start()

    def count(self) -> None:
        n = 0
        while not self.is_ended:
            n += 1

    @classmethod
    def start(cls) -> None:
        cls.current = cls()

    @classmethod
    def end(cls) -> None:
        assert cls.current is not None
        cls.current.is_ended = True
        cls.current.thread.join()


def send(parameter: RRef[Tensor], is_native: bool, count: int) -> None:
    """The loop of a client."""
    gradient = torch.ones(NUMBERS)
    torch.futures.wait_all(
        [
            rpc.rpc_async(parameter.owner(), update if is_native else update_in_python, (parameter, gradient))
            for _ in range(count)
        ]
    )


def rate(parameter: RRef[Tensor], is_native: bool, count: int) -> float:
    clients = [f"worker{rank}" for rank in range(2, 2 + CLIENTS)]
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async(client, send, (parameter, is_native, count)) for client in clients])
    return CLIENTS * count / (time.perf_counter() - started)


def measure(is_native: bool) -> harness.Figures:
    parameter = rpc.remote("worker1", torch.zeros, ([NUMBERS],))
    warm_up = 20
    rate(parameter, is_native, warm_up)  # this also compiles
    idle = rate(parameter, is_native, UPDATES)
    rpc.rpc_sync("worker1", Busy.start)
    busy = rate(parameter, is_native, UPDATES_WHILE_BUSY)
    rpc.rpc_sync("worker1", Busy.end)
    # Threads that run torch's add_ at the same time may overwrite each other's updates.
    if is_native:
        expected = CLIENTS * (warm_up + UPDATES + UPDATES_WHILE_BUSY)
        assert torch.equal(parameter.to_here(), torch.full((NUMBERS,), float(expected)))
    return {"updates": idle, "updates while Python is busy": busy}


def job(transport: jobs.Transport, name: str, is_native: bool) -> jobs.RpcJob:
    # worker0 measures, worker1 serves.
    named = dataclasses.replace(transport, name=name)
    return jobs.RpcJob(named, functools.partial(measure, is_native), workers=2 + CLIENTS)


BOUNDS = (Bound(None, 5), Bound(None, 5, reference=PYTHON))

BENCHMARK = harness.Benchmark(
    question="How many updates a second does a parameter server apply?",
    figures=(
        Figure("updates", "1/s", BOUNDS, more_is_better=True),
        Figure("updates while Python is busy", "1/s", BOUNDS, more_is_better=True),
    ),
    contenders=lambda: [
        job(jobs.UCX, "UCX", True),
        job(jobs.TENSORPIPE, "TensorPipe", False),
        job(jobs.UCX, PYTHON, False),
        job(jobs.TENSORPIPE, NATIVE_ON_TENSORPIPE, True),
        job(jobs.TENSORPIPE_UV, jobs.TENSORPIPE_UV.name, False),
    ],
    in_short_set=False,
)
