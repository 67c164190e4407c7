"""What does a worker do if it is called faster than it can answer?

worker1, worker2 and worker3 together make 10,000 calls of 1 MiB at once to worker0, which sums each. The benchmark
measures the throughput, and how much worker0's peak of resident memory grows. At the same time worker4, and worker1
itself, make small calls to worker0, one after the other. How long do these take?
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.in_flight import MIB, forget_peak, resident_mib
from benchmarks.small_calls import nothing

SENDERS = {"worker1": 3_334, "worker2": 3_333, "worker3": 3_333}
# A sender's calls share this many tensors, so that the queue of calls takes little memory of the callers.
TENSORS = 16
WINDOW_MIB = 64

is_over = threading.Event()


def total(number: int, tensor: torch.Tensor) -> tuple[int, float]:
    return number, tensor.sum().item()


def flood(calls: int) -> None:
    tensors = [torch.rand(MIB // 4) for _ in range(TENSORS)]
    sums = [tensor.sum().item() for tensor in tensors]
    pending = [
        rpc.rpc_async("worker0", total, (number, tensors[number % TENSORS]), timeout=0) for number in range(calls)
    ]
    for number, call in enumerate(pending):
        assert call.wait() == (number, sums[number % TENSORS])


def call_until_over() -> list[float]:
    is_over.clear()
    durations = []
    while not is_over.is_set():
        durations += harness.durations_us(lambda: rpc.rpc_sync("worker0", nothing, timeout=0), 1)
        time.sleep(0.001)
    return sorted(durations)


def end() -> None:
    is_over.set()


def measure() -> harness.Figures:
    for name in (*SENDERS, "worker4"):
        rpc.rpc_sync(name, nothing)
    before = forget_peak()
    small = {name: rpc.rpc_async(name, call_until_over, timeout=0) for name in ("worker4", "worker1")}
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async(name, flood, (calls,), timeout=0) for name, calls in SENDERS.items()])
    duration = time.perf_counter() - started
    figures = {
        "10,000 calls of 1 MiB": sum(SENDERS.values()) / 1024 / duration,
        "growth of the peak memory": resident_mib(peak=True) - before,
    }
    for name in small:
        rpc.rpc_sync(name, end)
    for title, name in (("of another worker", "worker4"), ("of a sender", "worker1")):
        durations = small[name].wait()
        figures[f"small call {title}, p50"] = harness.p50(durations) / 1e3
        figures[f"small call {title}, p99"] = harness.p99(durations) / 1e3
    return figures


BENCHMARK = harness.Benchmark(
    question="What do 10,000 large calls at once cost?",
    figures=(
        Figure("10,000 calls of 1 MiB", "GiB/s", more_is_better=True),
        Figure("growth of the peak memory", "MiB", (Bound(1.2 * WINDOW_MIB, reference=None),)),
        *(
            Figure(f"small call {title}, {figure}", "ms", bounds)
            for title in ("of another worker", "of a sender")
            for figure, bounds in (("p50", ()), ("p99", (Bound(100, reference=None),)))
        ),
    ),
    contenders=lambda: [jobs.FreshRpcJob(transport, measure, workers=5) for transport in (jobs.UCX, jobs.UCX_TCP)],
    rounds=3,
    in_short_set=False,
)
