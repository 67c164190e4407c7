"""How fast does a value of a channel travel?

Two workers on one host. The round trip of 4 KiB is one value there and one back. It is compared with a call of a
builtin operator, and with gloo's ``send`` and ``recv`` between the same workers. 64 MiB into posted tensors are
compared with a memcpy.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.large_tensors import LARGE, measure_memcpy

ROUND_TRIPS, LARGE_VALUES = 2000, 9
SMALL = 1024  # the number of floats

CHANNEL = dataclasses.replace(jobs.UCX, name="channel")
CALL = dataclasses.replace(jobs.UCX, name="rpc_sync of torch.neg")
CHANNEL_TCP = dataclasses.replace(jobs.UCX_TCP, name="channel, tcp")
GLOO, MEMCPY = "gloo", "memcpy"
ROUND_TRIP, INTO = "round trip of 4 KiB, p50", "64 MiB into given tensors"


def answer(round_trips: int, larges: int) -> None:
    """The part of the other worker in `measure`."""
    from torch_ucx_rpc.channel import Channel

    channel = Channel("benchmark")
    for _ in range(round_trips):
        channel.put("worker0", "back", channel.take("worker0", "there"))
    into = torch.zeros(LARGE, dtype=torch.uint8)
    for _ in range(larges):
        posted = channel.post("worker0", "large", into)
        channel.put("worker0", "ready", torch.empty(0))
        posted.wait()
        channel.put("worker0", "done", torch.empty(0))


def measure() -> harness.Figures:
    from torch_ucx_rpc.channel import Channel

    channel = Channel("benchmark")
    small, large = torch.randn(SMALL), torch.ones(LARGE, dtype=torch.uint8)
    other = rpc.rpc_async("worker1", answer, (ROUND_TRIPS, LARGE_VALUES))

    def round_trip() -> None:
        channel.put("worker1", "there", small)
        channel.take("worker1", "back")

    trips = harness.durations_us(round_trip, ROUND_TRIPS)

    def put_large() -> None:
        channel.put("worker1", "large", large)
        channel.take("worker1", "done")

    durations = []
    for _ in range(LARGE_VALUES):
        channel.take("worker1", "ready")
        durations += harness.durations_us(put_large, 1)
    other.wait()
    return {ROUND_TRIP: harness.p50(trips), INTO: LARGE / 2**30 / (1e-6 * harness.p50(sorted(durations)))}


def measure_calls() -> harness.Figures:
    small = torch.randn(SMALL)
    return {
        ROUND_TRIP: harness.p50(harness.durations_us(lambda: rpc.rpc_sync("worker1", torch.neg, (small,)), ROUND_TRIPS))
    }


def _gloo_worker(rank: int, store: str, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    small = torch.randn(SMALL)

    def round_trip() -> None:
        if rank == 0:
            dist.send(small, 1)
            dist.recv(small, 1)
        else:
            dist.recv(small, 0)
            dist.send(small, 0)

    trips = harness.durations_us(round_trip, ROUND_TRIPS)
    if rank == 0:
        result.send(harness.p50(trips))
    dist.barrier()
    dist.destroy_process_group()


def measure_gloo() -> harness.Figures:
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = jobs.PROCESSES.Pipe()
        store = Path(folder, "store").as_uri()
        workers = [jobs.PROCESSES.Process(target=_gloo_worker, args=(rank, store, theirs)) for rank in range(2)]
        for worker in workers:
            worker.start()
        if not mine.poll(jobs.LIMIT_S):
            raise harness.ContenderFailed("gloo has not answered")
        figures = {ROUND_TRIP: mine.recv()}
        for worker in workers:
            worker.join()
    return figures


def contenders() -> list[harness.Contender]:
    return [
        jobs.RpcJob(CHANNEL, measure),
        jobs.RpcJob(CALL, measure_calls),
        jobs.Baseline(GLOO, measure_gloo),
        jobs.Baseline(MEMCPY, measure_memcpy_into),
        jobs.RpcJob(CHANNEL_TCP, measure),
    ]


def measure_memcpy_into() -> harness.Figures:
    (rate,) = measure_memcpy().values()
    return {INTO: rate}


BENCHMARK = harness.Benchmark(
    question="How fast does a value of a channel travel?",
    figures=(
        Figure(
            ROUND_TRIP,
            "us",
            (Bound(1.0, 0.8, CHANNEL.name, CALL.name), Bound(1.0, 0.5, CHANNEL.name, GLOO)),
        ),
        Figure(INTO, "GiB/s", (Bound(0.7, 0.9, CHANNEL.name, MEMCPY),), more_is_better=True),
    ),
    contenders=contenders,
)
