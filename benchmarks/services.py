"""What does a call by name cost, and what do many names?

Calls: one job calls a service by its name, and the same function by ``rpc_sync``, in turns. The ratio of the two in
each round counts. The same is done with three replicas, and with asynchronous calls by name.

The death of a replica: of 1,000 idempotent calls to three replicas, how many fail if one replica is killed after the
first 250? How long after the kill does the caller's table lose the replica's names? The kernel needs most of that time
to end the process. A poll of the process's descriptor shows when the process has ended.

Joining: 63 workers are members of a group without a size, and offer 100 names each, or none. Another worker joins,
makes one call, by name or by ``rpc_sync``, and leaves. How long does joining take, without and with that call?
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.small_calls import echo, nothing
from torch_ucx_rpc import services

CALLS, TURNS = 200, 20
REPLICAS = ("worker1", "worker2", "worker3")


def offer(names: list[str]) -> None:
    functions: dict[str, Callable[..., object]] = {"nothing": nothing, "echo": echo}
    services.register_all({name: functions[name.partition(" ")[0]] for name in names})


def offer_napping() -> None:
    services.register("nap", nap, idempotent=True)


def nap() -> None:
    time.sleep(0.0002)


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median duration of each way, in microseconds. The order changes from turn to turn."""
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
    contenders=lambda: [jobs.RpcJob(transport, measure, workers=4) for transport in jobs.ON_ONE_HOST],
    rounds=3,
)


# ------------------------------------------------------------------------------------------------------------- a death

KILL_CALLS = 1000


def measure_death() -> harness.Figures:
    for worker in REPLICAS:
        rpc.rpc_sync(worker, offer_napping)
    services.call("nap")
    pid = rpc.rpc_sync("worker2", os.getpid)
    process = os.pidfd_open(pid)
    ended_at: list[float] = []

    def wait_for_its_end() -> None:
        select.select([process], [], [])
        ended_at.append(time.perf_counter())

    waiting = threading.Thread(target=wait_for_its_end)
    waiting.start()
    purged_at: list[float] = []
    is_purged = threading.Event()

    def on_change(service: services.Service) -> None:
        if len(service.workers) == len(REPLICAS) - 1:
            purged_at.append(time.perf_counter())
            is_purged.set()

    services.watch("nap", on_change)
    failed = 0
    calls = []
    for number in range(KILL_CALLS):
        if number == KILL_CALLS // 4:
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
        if number % 2:
            calls.append(services.call_async("nap"))
        else:
            try:
                services.call("nap")
            except RuntimeError:
                failed += 1
    for call in calls:
        try:
            call.wait()
        except RuntimeError:
            failed += 1
    assert is_purged.wait(10)
    waiting.join()
    os.close(process)
    return {
        "failed of 1,000 calls": failed,
        "process ended after": 1e3 * (ended_at[0] - killed_at),
        "names gone after": 1e3 * (purged_at[0] - killed_at),
    }


DEATH = harness.Benchmark(
    question="What does the death of a replica do?",
    figures=(
        Figure("failed of 1,000 calls", "", (Bound(0, reference=None),)),
        Figure("process ended after", "ms"),
        Figure("names gone after", "ms", (Bound(50, reference=None),)),
    ),
    contenders=lambda: [jobs.FreshRpcJob(jobs.UCX, measure_death, workers=4, kills=True)],
    rounds=3,
)


# ------------------------------------------------------------------------------------------------------------- joining

MEMBERS, NAMES_EACH, JOINS = 63, 100, 5
WITH_NAMES, WITHOUT_NAMES = "UCX", "UCX, no names"


def _enter(rank: int, store: str) -> None:
    import torch_ucx_rpc

    torch.set_num_threads(1)
    options = torch_ucx_rpc.UcxRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType["UCX"], rank=rank, rpc_backend_options=options)


def _be_member(rank: int, store: str, names: int, ready: Any, is_over: Any) -> None:
    _enter(rank, store)
    if names:
        services.register_all({f"name {number} of {rank}": nothing for number in range(names)})
    ready.put(rank)
    is_over.wait()
    rpc.shutdown()


def _join(rank: int, store: str, names: int, report: Any) -> None:
    started = time.perf_counter()
    _enter(rank, store)
    joined = time.perf_counter()
    if names:
        services.call(f"name {names - 1} of {MEMBERS // 2}")
    else:
        rpc.rpc_sync(f"worker{MEMBERS // 2}", nothing)
    called = time.perf_counter()
    report.put((1e3 * (joined - started), 1e3 * (called - started)))
    rpc.shutdown()


def measure_joining(names: int) -> harness.Figures:
    ready, report, is_over = jobs.PROCESSES.Queue(), jobs.PROCESSES.Queue(), jobs.PROCESSES.Event()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        members = [
            jobs.PROCESSES.Process(target=_be_member, args=(rank, store, names, ready, is_over), daemon=True)
            for rank in range(MEMBERS)
        ]
        try:
            for member in members:
                member.start()
            for _ in members:
                ready.get(timeout=180)
            durations = []
            for _ in range(JOINS):
                joiner = jobs.PROCESSES.Process(target=_join, args=(MEMBERS, store, names, report), daemon=True)
                joiner.start()
                durations.append(report.get(timeout=60))
                joiner.join()
        finally:
            is_over.set()
            for member in members:
                member.join(30)
                member.kill()
    joined, called = zip(*durations, strict=True)
    return {"joining": statistics.median(joined), "joining and a call": statistics.median(called)}


JOINING = harness.Benchmark(
    question="What do 6,300 names cost a worker that joins?",
    figures=(
        Figure("joining", "ms", (Bound(1.1, reference=WITHOUT_NAMES),)),
        Figure("joining and a call", "ms", (Bound(1.1, reference=WITHOUT_NAMES),)),
    ),
    contenders=lambda: [
        jobs.Baseline(WITH_NAMES, lambda: measure_joining(NAMES_EACH)),
        jobs.Baseline(WITHOUT_NAMES, lambda: measure_joining(0)),
    ],
    rounds=2,
    in_short_set=False,
)
