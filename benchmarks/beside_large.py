"""How long does a small call take while large tensors travel?

One thread echoes 64 MiB to the other worker again and again. Another thread calls a function without arguments once a
millisecond. Both call the same peer, and so use the same connections.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.large_tensors import echo
from benchmarks.small_calls import nothing

GIB = 2**30
SIZE = 2**26
SECONDS = 2.0
# On TensorPipe a call beside the echoes takes 35 ms.
CALLS = harness.FEWEST_FOR_P99


def measure() -> harness.Figures:
    tensor = torch.rand(SIZE // 4)
    echoes = 0
    echoed = tensor
    is_over = threading.Event()

    def echo_large() -> None:
        nonlocal echoes, echoed
        while not is_over.is_set():
            echoed = rpc.rpc_sync("worker1", echo, (tensor,))
            echoes += 1

    rpc.rpc_sync("worker1", nothing)
    large = threading.Thread(target=echo_large)
    started = time.perf_counter()
    large.start()
    durations: list[float] = []
    while time.perf_counter() - started < SECONDS or len(durations) < CALLS:
        begun = time.perf_counter()
        rpc.rpc_sync("worker1", nothing)
        durations.append(1e6 * (time.perf_counter() - begun))
        time.sleep(0.001)
    is_over.set()
    large.join()
    rate = 2 * SIZE * echoes / GIB / (time.perf_counter() - started)
    assert torch.equal(echoed, tensor)
    durations.sort()
    return {
        "small call beside 64 MiB, p50": harness.p50(durations),
        "the same, p99": harness.p99(durations),
        "the echoes of 64 MiB, both ways": rate,
    }


BENCHMARK = harness.Benchmark(
    question="How long does a small call take beside large tensors?",
    figures=(
        Figure("small call beside 64 MiB, p50", "us", (Bound(1.0), jobs.over_tcp(1))),
        Figure("the same, p99", "us", (Bound(1.0), jobs.over_tcp(1))),
        Figure("the echoes of 64 MiB, both ways", "GiB/s", more_is_better=True),
    ),
    contenders=lambda: [jobs.RpcJob(transport, measure) for transport in jobs.TRANSPORTS],
    rounds=3,
)
