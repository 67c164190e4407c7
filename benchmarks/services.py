"""What does a call by name cost, and what do many names?

Calls: a service is called by its name, and the same function by ``rpc_sync``, in turns within one job; what counts is
the ratio of the two in each round. Three replicas are called likewise, and a name by asynchronous calls.

Joining: 63 workers are members of a group without a size and offer 100 names each, or none. Another joins, makes one
call by name, or by ``rpc_sync`` where there are no names, and leaves; how long that takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness
from benchmarks.harness import Bound, Figure
from benchmarks.small_calls import echo, nothing
from torch_ucx_rpc import services

CALLS, TURNS = 200, 20
REPLICAS = ("worker1", "worker2", "worker3")


def offer(names: list[str]) -> None:
    for name in names:
        services.register(name, {"nothing": nothing, "echo": echo}[name.partition(" ")[0]], idempotent=True)


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median duration of each, in microseconds; which comes first changes from turn to turn."""
    durations: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(TURNS):
        for name in order:
            durations[name] += harness.durations_us(ways[name], CALLS)
        order.reverse()
    return {name: statistics.median(values) for name, values in durations.items()}


def rate(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    torch.futures.wait_all([call() for _ in range(2000)])
    return 2000 / (time.perf_counter() - started)


def measure() -> harness.Figures:
    if "nothing" not in {service.name for service in services.names()}:
        rpc.rpc_sync("worker1", offer, (["nothing", "echo"],))
        for worker in REPLICAS:
            rpc.rpc_sync(worker, offer, (["nothing at three"],))
    kilobyte = torch.randn(256)
    medians = in_turns(
        {
            "rpc_sync": lambda: rpc.rpc_sync("worker1", nothing),
            "call": lambda: services.call("nothing"),
            "rpc_sync, 1 KB": lambda: rpc.rpc_sync("worker1", echo, (kilobyte,)),
            "call, 1 KB": lambda: services.call("echo", kilobyte),
            "call of one of three replicas": lambda: services.call("nothing at three"),
        }
    )
    rates = [
        (rate(lambda: rpc.rpc_async("worker1", nothing)), rate(lambda: services.call_async("nothing")))
        for _ in range(5)
    ]
    return {
        **medians,
        "call to rpc_sync": medians["call"] / medians["rpc_sync"],
        "call to rpc_sync, 1 KB": medians["call, 1 KB"] / medians["rpc_sync, 1 KB"],
        "rpc_async": statistics.median(plain for plain, _ in rates),
        "call_async": statistics.median(named for _, named in rates),
        "call_async to rpc_async": statistics.median(named / plain for plain, named in rates),
    }


CALL = harness.Benchmark(
    question="What does a call by name cost?",
    figures=(
        Figure("rpc_sync", "us"),
        Figure("call", "us", (Bound(None),)),
        Figure("call to rpc_sync", "ratio", (Bound(1.05, reference=None),)),
        Figure("rpc_sync, 1 KB", "us"),
        Figure("call, 1 KB", "us", (Bound(None),)),
        Figure("call to rpc_sync, 1 KB", "ratio", (Bound(1.05, reference=None),)),
        Figure("call of one of three replicas", "us"),
        Figure("rpc_async", "1/s"),
        Figure("call_async", "1/s"),
        Figure("call_async to rpc_async", "ratio"),
    ),
    contenders=lambda: [
        harness.RpcJob(transport, measure, workers=4) for transport in (harness.UCX, harness.TENSORPIPE)
    ],
)
