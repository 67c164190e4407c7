"""Does the cost grow as the work grows?

The echo of a tensor from 1 byte to 1 GiB; 1 to 10,000 calls in flight; jobs of 2 to 64 workers. The benchmark measures
times, and how much the callee's peak of resident memory grows. Straight lines are good. A step shows a badly chosen
threshold. plot.py draws the results.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Figure
from benchmarks.in_flight import forget_peak, resident_mib
from benchmarks.large_tensors import echo, echo_us
from benchmarks.many_workers import Life
from benchmarks.small_calls import nothing

# These include sizes on both sides of three thresholds: a tensor leaves the body, the body is no longer eager, a tensor
# is sent in pieces.
SIZES = sorted([4**power for power in range(16)] + [2**15, 2**15 + 1, 2**18 + 1, 2**22 + 1])
IN_FLIGHT = [1, 10, 100, 1_000, 10_000]
# Each measurement of memory has new processes: warm pools would hide the cost of a size.
MEMORY_SIZES = [1, 2**18, 2**22 + 1, 2**26, 2**30]
WORKERS = [2, 4, 8, 16, 24, 32, 64]
TENSORPIPE_WORKERS = [2, 4, 8, 16, 24]  # larger jobs on TensorPipe end in errors


def memory_of(work: int) -> str:
    return f"{work}, growth of the callee's peak memory"


def figures_of(works: list[int], memory_works: list[int]) -> tuple[Figure, ...]:
    return (
        *(Figure(f"{work}", "us") for work in works),
        *(Figure(memory_of(work), "MiB") for work in memory_works),
    )


def measure_sizes() -> harness.Figures:
    figures = {}
    for size in SIZES:
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        calls = max(3, min(500, 2**28 // size))
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)  # and warms up
        figures[f"{size}"] = harness.p50(echo_us(tensor, calls))
    return figures


def measure_memory_of_size(size: int) -> harness.Figures:
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    rpc.rpc_sync("worker1", echo, (tensor[:1],))
    before = rpc.rpc_sync("worker1", forget_peak)
    for _ in range(5):
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)
    return {memory_of(size): rpc.rpc_sync("worker1", resident_mib, (True,)) - before}


def measure_in_flight() -> harness.Figures:
    figures = {}
    for calls in IN_FLIGHT:
        repeats = max(1, 2_000 // calls)
        started = time.perf_counter()
        for _ in range(repeats):
            torch.futures.wait_all([rpc.rpc_async("worker1", nothing) for _ in range(calls)])
        figures[f"{calls}"] = 1e6 * (time.perf_counter() - started) / (repeats * calls)
    return figures


def measure_memory_of_calls(calls: int) -> harness.Figures:
    rpc.rpc_sync("worker1", nothing)
    before = rpc.rpc_sync("worker1", forget_peak)
    torch.futures.wait_all([rpc.rpc_async("worker1", nothing) for _ in range(calls)])
    return {memory_of(calls): rpc.rpc_sync("worker1", resident_mib, (True,)) - before}


class Sweep(jobs.RpcJob):
    """Measures times in a job that lives through all rounds. Measures memory in new processes, for each amount of
    work."""

    def __init__(
        self,
        transport: jobs.Transport,
        measure: Callable[[], harness.Figures],
        measure_memory: Callable[[int], harness.Figures],
        works: list[int],
    ) -> None:
        super().__init__(transport, measure)
        self._memory_jobs = [jobs.FreshRpcJob(transport, functools.partial(measure_memory, work)) for work in works]

    def measure(self) -> harness.Figures:
        figures = super().measure()
        for job in self._memory_jobs:
            figures |= job.measure()
        return figures


SIZE_SWEEP = harness.Benchmark(
    question="How does the echo of a tensor grow with its bytes?",
    figures=figures_of(SIZES, MEMORY_SIZES),
    contenders=lambda: [
        Sweep(transport, measure_sizes, measure_memory_of_size, MEMORY_SIZES) for transport in jobs.TRANSPORTS
    ],
    rounds=2,
    in_short_set=False,
)

IN_FLIGHT_SWEEP = harness.Benchmark(
    question="How does a call's share of the time grow with the calls in flight?",
    figures=figures_of(IN_FLIGHT, IN_FLIGHT),
    contenders=lambda: [
        Sweep(transport, measure_in_flight, measure_memory_of_calls, IN_FLIGHT) for transport in jobs.ON_ONE_HOST
    ],
    rounds=2,
    in_short_set=False,
)

WORKER_SWEEP = harness.Benchmark(
    question="How does the life of a job grow with its workers?",
    figures=tuple(Figure(f"{workers} workers, in sum", "s") for workers in WORKERS),
    contenders=lambda: [
        Life(jobs.UCX, *WORKERS),
        Life(jobs.TENSORPIPE, *TENSORPIPE_WORKERS),
        Life(jobs.TENSORPIPE_UV, *WORKERS),
    ],
    rounds=2,
    in_short_set=False,
)
