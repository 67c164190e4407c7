"""What do many calls at once cost, the first time?

300 asynchronous calls with 1 MiB each, which the callee sums. The two workers have exchanged nothing large before. The
benchmark measures the throughput, and how much the callee's peak of resident memory grows.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

MIB = 2**20
CALLS = 300


def nothing() -> None:
    """The callee of a call that connects, and warms up everything except memory."""


def total(tensor: torch.Tensor) -> float:
    return tensor.sum().item()


def resident_mib(peak: bool) -> float:
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> float:
    """Return the present resident memory, and reset the peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_mib(peak=False)


def measure() -> harness.Figures:
    tensors = [torch.rand(MIB // 4) for _ in range(CALLS)]
    expected = [total(tensor) for tensor in tensors]
    for _ in range(20):
        rpc.rpc_sync("worker1", nothing)
        rpc.rpc_sync("worker1", total, (tensors[0][:256],))
    before = rpc.rpc_sync("worker1", forget_peak)
    started = time.perf_counter()
    sums = torch.futures.wait_all([rpc.rpc_async("worker1", total, (tensor,)) for tensor in tensors])
    duration = time.perf_counter() - started
    assert sums == expected
    return {
        "300 calls of 1 MiB, the first time": CALLS / 1024 / duration,
        "growth of the callee's peak memory": rpc.rpc_sync("worker1", resident_mib, (True,)) - before,
    }


BENCHMARK = harness.Benchmark(
    question="What do many large calls at once cost?",
    figures=(
        Figure(
            "300 calls of 1 MiB, the first time",
            "GiB/s",
            (Bound(1.2, 2), jobs.over_tcp(1)),
            more_is_better=True,
        ),
        Figure("growth of the callee's peak memory", "MiB", (Bound(0.6),)),
    ),
    contenders=lambda: [jobs.FreshRpcJob(transport, measure) for transport in jobs.TRANSPORTS],
)
