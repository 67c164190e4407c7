"""How long does a small call take?

Two workers on one host: a call of a Python function without arguments, a builtin operator on one element, the echo of 1
KB, and the number of asynchronous calls a second.
"""

from __future__ import annotations

import time

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

CALLS = 2000


def nothing() -> None:
    """The callee of the smallest call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure() -> harness.Figures:
    one, kilobyte = torch.ones(1), torch.randn(256)
    empty = harness.durations_us(lambda: rpc.rpc_sync("worker1", nothing), CALLS)
    add = harness.durations_us(lambda: rpc.rpc_sync("worker1", torch.add, (one, one)), CALLS)
    echoed = harness.durations_us(lambda: rpc.rpc_sync("worker1", echo, (kilobyte,)), CALLS)
    assert torch.equal(rpc.rpc_sync("worker1", echo, (kilobyte,)), kilobyte)
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async("worker1", nothing) for _ in range(CALLS)])
    rate = CALLS / (time.perf_counter() - started)
    return {
        "no-argument function, p50": harness.p50(empty),
        "no-argument function, p99": harness.p99(empty),
        "torch.add of 1 element, p50": harness.p50(add),
        "echo of 1 KB, p50": harness.p50(echoed),
        "asynchronous calls": rate,
    }


BENCHMARK = harness.Benchmark(
    question="How long does a small call take?",
    figures=(
        Figure("no-argument function, p50", "us", (Bound(0.5, 0.33), jobs.over_tcp(0.6, 0.4))),
        Figure("no-argument function, p99", "us", (Bound(0.6, 0.4), jobs.over_tcp(0.6, 0.4))),
        Figure("torch.add of 1 element, p50", "us", (Bound(0.5, 0.3), jobs.over_tcp(0.6, 0.4))),
        Figure("echo of 1 KB, p50", "us", (Bound(0.45, 0.3), jobs.over_tcp(0.6, 0.4))),
        Figure("asynchronous calls", "1/s", (Bound(2, 3), jobs.over_tcp(1, 3)), more_is_better=True),
    ),
    contenders=lambda: [jobs.RpcJob(transport, measure) for transport in jobs.TRANSPORTS],
)
