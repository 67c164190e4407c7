"""Does the cost grow as the work grows?

The echo of one tensor from 1 byte to 1 GiB; 1 to 10,000 calls in flight; jobs of 2 to 64 workers: their time, and by
how much the callee's peak of resident memory grows meanwhile. Straight lines are good; steps are thresholds chosen
badly. plot.py draws what this measures.
"""

from __future__ import annotations

import time

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness
from benchmarks.harness import Figure
from benchmarks.in_flight import forget_peak, resident_mib
from benchmarks.large_tensors import echo
from benchmarks.many_workers import Life
from benchmarks.small_calls import nothing

# Also both sides of where a tensor leaves the body of its message, where that is no longer eager, where pieces begin.
SIZES = sorted([4**power for power in range(16)] + [2**15, 2**15 + 1, 2**18 + 1, 2**22 + 1])
IN_FLIGHT = [1, 10, 100, 1_000, 10_000]
WORKERS = [2, 4, 8, 16, 24, 32, 48, 64]
TENSORPIPE_WORKERS = [2, 4, 8, 16, 24]  # the life of larger jobs ends in errors there


def memory_of(work: int) -> str:
    return f"{work}, growth of the callee's peak memory"


def figures_of(works: list[int]) -> tuple[Figure, ...]:
    return tuple(figure for work in works for figure in (Figure(f"{work}", "us"), Figure(memory_of(work), "MiB")))


def measure_sizes() -> harness.Figures:
    figures = {}
    for size in SIZES:
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        calls = max(3, min(500, 2**28 // size))
        before = rpc.rpc_sync("worker1", forget_peak)
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)  # and warms
        durations = harness.durations_us(lambda tensor=tensor: rpc.rpc_sync("worker1", echo, (tensor,)), calls)
        figures[f"{size}"] = harness.p50(durations)
        figures[memory_of(size)] = rpc.rpc_sync("worker1", resident_mib, (True,)) - before
    return figures


def measure_in_flight() -> harness.Figures:
    figures = {}
    for calls in IN_FLIGHT:
        repeats = max(1, 2_000 // calls)
        before = rpc.rpc_sync("worker1", forget_peak)
        started = time.perf_counter()
        for _ in range(repeats):
            torch.futures.wait_all([rpc.rpc_async("worker1", nothing) for _ in range(calls)])
        figures[f"{calls}"] = 1e6 * (time.perf_counter() - started) / (repeats * calls)
        figures[memory_of(calls)] = rpc.rpc_sync("worker1", resident_mib, (True,)) - before
    return figures


SIZE_SWEEP = harness.Benchmark(
    question="How does the echo of a tensor grow with its bytes?",
    figures=figures_of(SIZES),
    contenders=lambda: [harness.RpcJob(transport, measure_sizes) for transport in harness.TRANSPORTS],
    rounds=3,
    in_short_set=False,
)

IN_FLIGHT_SWEEP = harness.Benchmark(
    question="How does a call's share of the time grow with the calls in flight?",
    figures=figures_of(IN_FLIGHT),
    contenders=lambda: [
        harness.RpcJob(transport, measure_in_flight) for transport in (harness.UCX, harness.TENSORPIPE)
    ],
    rounds=3,
    in_short_set=False,
)

WORKER_SWEEP = harness.Benchmark(
    question="How does the life of a job grow with its workers?",
    figures=tuple(Figure(f"{workers} workers, in sum", "s") for workers in WORKERS),
    contenders=lambda: [Life(harness.UCX, *WORKERS), Life(harness.TENSORPIPE, *TENSORPIPE_WORKERS)],
    rounds=3,
    in_short_set=False,
)
