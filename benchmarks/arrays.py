"""How fast do NumPy's arrays travel?

The echo of arrays of 1 KB, 1 MiB and 64 MiB between two workers on one host. It is compared with TensorPipe, which
pickles arrays, and with arrays of a subclass on UCX, which are pickled too.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

MIB = 2**20
LARGE = 64 * MIB
PICKLED = "UCX, pickled"


class Pickled(np.ndarray):
    """An array of a type that the pickler does not know."""


def echo(array: np.ndarray) -> np.ndarray:
    return array


def echo_us(array: np.ndarray, count: int) -> list[float]:
    """Return the durations of ``count`` echoes, sorted."""
    return harness.durations_us(lambda: rpc.rpc_sync("worker1", echo, (array,)), count)


def measure(type_: type[np.ndarray]) -> harness.Figures:
    figures = {}
    for name, size, calls in (("1 KB", 1000, 1000), ("1 MiB", MIB, 100), ("64 MiB", LARGE, 5)):
        array = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).view(type_)
        returned = rpc.rpc_sync("worker1", echo, (array,))  # this also warms up
        assert type(returned) is type_
        assert np.array_equal(returned, array)
        del returned
        figures[name] = harness.p50(echo_us(array, calls))
    return {
        "echo of 1 KB, p50": figures["1 KB"],
        "echo of 1 MiB, p50": figures["1 MiB"],
        "echo of 64 MiB, both ways": 2 * LARGE / 2**30 / (1e-6 * figures["64 MiB"]),
    }


BENCHMARK = harness.Benchmark(
    question="How fast do NumPy's arrays travel?",
    figures=(
        Figure("echo of 1 KB, p50", "us", (Bound(0.5),)),
        Figure("echo of 1 MiB, p50", "us", (Bound(0.5), Bound(0.5, reference=PICKLED))),
        Figure("echo of 64 MiB, both ways", "GiB/s", (Bound(2.5), Bound(2, reference=PICKLED)), more_is_better=True),
    ),
    contenders=lambda: [
        *(jobs.RpcJob(transport, functools.partial(measure, np.ndarray)) for transport in jobs.ON_ONE_HOST),
        jobs.RpcJob(dataclasses.replace(jobs.UCX, name=PICKLED), functools.partial(measure, Pickled)),
    ],
    rounds=3,
    in_short_set=False,
)
