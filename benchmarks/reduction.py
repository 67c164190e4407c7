"""What does a step of data-parallel training cost if its gradients go through a server?

Four trainers on one host train models whose gradients have 1, 10 and 100 MB and cost almost nothing to compute. How
long does a step take (forward, backward, average) for the slowest trainer? The contenders are: DistributedDataParallel
with the hook of `torch_ucx_rpc.reduction`, hosted by the trainers themselves or by another worker; `DataParallel`;
DistributedDataParallel on gloo; and a server written by hand with ``rpc_sync``.

Then there are disturbances. One of four trainers is killed: the slowest of the next steps is compared with a usual one.
One trainer computes ten times as long as the others, which do not wait for it (``quorum=3``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from torch_ucx_rpc import reduction

_T = TypeVar("_T")

TRAINERS = 4
SIZES = {"1 MB": (1_000_000, 100), "10 MB": (10_000_000, 40), "100 MB": (100_000_000, 8)}
# DDP makes its final buckets after the first step, and the hook knows them two steps later. The first step with them
# allocates the memory for all later steps.
WARM_UP = 5
GLOO, PLAIN = "gloo's DDP", "rpc_sync loop"
HOOK, ONE_SERVER, WITHOUT_C10D = "UCX", "UCX, one server", "UCX, DataParallel"
HOOK_ON_TENSORPIPE, HOOK_ON_TENSORPIPE_UV = harness.TENSORPIPES


class Wide(nn.Module):
    """A model with parameters of this many bytes. Each step needs all their gradients."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(nbytes // 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = sum(layer.sum() for layer in self.layers) * x
        return product


# ---------------------------------------------------------------------------------------- a server written by hand


class Sum:
    """The sum of a step. The calls of trainers wait here, each in its own thread, until all trainers have called."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.total: list[torch.Tensor] | None = None
        self.mean: list[torch.Tensor] = []
        self.count = 0
        self.steps = 0

    def add(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.arrived:
            step = self.steps
            if self.total is None:
                self.total = gradients
            else:
                for total, gradient in zip(self.total, gradients, strict=True):
                    total.add_(gradient)
            self.count += 1
            if self.count == TRAINERS:
                for total in self.total:
                    total.div_(TRAINERS)
                self.mean, self.total, self.count, self.steps = self.total, None, 0, step + 1
                self.arrived.notify_all()
            else:
                self.arrived.wait_for(lambda: self.steps > step)
            return self.mean


_sum = Sum()


def add(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return _sum.add(gradients)


def average_by_hand(model: nn.Module) -> None:
    mean = rpc.rpc_sync("worker4", add, ([parameter.grad for parameter in model.parameters()],))
    for parameter, gradient in zip(model.parameters(), mean, strict=True):
        parameter.grad = gradient


# ---------------------------------------------------------------------------------------------------------- a trainer


def wrapped(way: str, model: nn.Module, name: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Return the model to call, and what to do with gradients after the backward."""
    trainers = [f"worker{rank}" for rank in range(TRAINERS)]
    if way == PLAIN:
        return model, average_by_hand
    if way == WITHOUT_C10D:
        # Each model has its own server, since only a new server waits for all trainers.
        return reduction.DataParallel(model, reduction.serve(name=name)), lambda _: None
    ddp = DistributedDataParallel(model)
    if way != GLOO:
        server = reduction.serve(*(["worker4"] if way == ONE_SERVER else []), trainers=trainers)
        ddp.register_comm_hook(reduction.state(server), reduction.hook)
    return ddp, lambda _: None


def begin(store: str, rank: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=TRAINERS)


def train(way: str, nbytes: int, steps: int) -> float:
    """Return the milliseconds of a step."""
    model = Wide(nbytes)
    called, average = wrapped(way, model, f"{nbytes} bytes")
    x = torch.ones(())
    rank = rpc.get_worker_info().id
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.perf_counter()
        model.zero_grad()
        called(x * (rank + step)).backward()
        average(model)
    duration = time.perf_counter() - started
    mean = step + (TRAINERS - 1) / 2
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is not None and torch.equal(g[:3], torch.full((3,), mean)) for g in gradients)
    return 1e3 * duration / steps


def on_all(function: Callable[..., _T], *arguments: object) -> list[_T]:
    return torch.futures.wait_all(
        [rpc.rpc_async(f"worker{rank}", function, arguments, timeout=0) for rank in range(TRAINERS)]
    )


def measure(way: str) -> harness.Figures:
    if way not in (PLAIN, WITHOUT_C10D) and not dist.is_initialized():
        store = Path(tempfile.mkdtemp(), "group").as_uri()
        torch.futures.wait_all([rpc.rpc_async(f"worker{rank}", begin, (store, rank)) for rank in range(TRAINERS)])
    return {size: max(on_all(train, way, nbytes, steps)) for size, (nbytes, steps) in SIZES.items()}


def job(transport: jobs.Transport, way: str, name: str) -> jobs.FreshRpcJob:
    workers = TRAINERS + (way in (PLAIN, ONE_SERVER))
    return jobs.FreshRpcJob(dataclasses.replace(transport, name=name), functools.partial(measure, way), workers=workers)


STEP = harness.Benchmark(
    question="How long does a step of four trainers take?",
    figures=tuple(
        Figure(
            size,
            "ms",
            (
                Bound(1.0, reference=GLOO),
                Bound(1.0, contender=ONE_SERVER, reference=GLOO),
                Bound(1.0, contender=WITHOUT_C10D, reference=GLOO),
                Bound(None, reference=PLAIN),
                Bound(None),
            ),
        )
        for size in SIZES
    ),
    # Each round has new processes: what a model leaves would count as memory of the next one.
    contenders=lambda: [
        job(jobs.UCX, HOOK, HOOK),
        job(jobs.UCX, GLOO, GLOO),
        job(jobs.UCX, WITHOUT_C10D, WITHOUT_C10D),
        job(jobs.UCX, ONE_SERVER, ONE_SERVER),
        job(jobs.UCX, PLAIN, PLAIN),
        job(jobs.TENSORPIPE, HOOK, HOOK_ON_TENSORPIPE),
        job(jobs.TENSORPIPE_UV, HOOK, HOOK_ON_TENSORPIPE_UV),
    ],
    rounds=4,
)


# ----------------------------------------------------------------------------------------------------- disturbances

DISTURBED_STEPS, KILLED_AT = 60, 30
COMPUTING_S, SLOW = 0.02, 10
# The names of trainings that this worker must end.
_over: set[str] = set()


def train_disturbed(name: str, computing_s: float, quorum: int | None, killed_at: int | None) -> list[float]:
    """Return the duration of each step, in milliseconds."""
    steps = DISTURBED_STEPS
    model = reduction.DataParallel(Wide(1_000_000), reduction.serve("worker0", name=name), quorum=quorum)
    durations = []
    for step in range(steps):
        if name in _over:
            break
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.perf_counter()
        time.sleep(computing_s)
        model(torch.ones(())).backward()
        durations.append(1e3 * (time.perf_counter() - started))
    return durations


def end(name: str) -> None:
    _over.add(name)


def measure_disturbances() -> harness.Figures:
    def begin_all(
        name: str, computing_s: list[float], quorum: int | None, killed: int | None = None
    ) -> list[Future[list[float]]]:
        return [
            rpc.rpc_async(
                f"worker{rank}",
                train_disturbed,
                (name, computing_s[rank - 1], quorum, KILLED_AT if rank == killed else None),
                timeout=0,
            )
            for rank in range(1, TRAINERS + 1)
        ]

    def median_step(futures: list[Future[list[float]]]) -> float:
        return statistics.median(duration for future in futures for duration in future.wait()[5:])

    even = [COMPUTING_S] * TRAINERS
    usual = median_step(begin_all("usual", even, TRAINERS - 1))
    futures = begin_all("slow", [*even[:-1], SLOW * COMPUTING_S], TRAINERS - 1)
    with_a_slow_one = median_step(futures[:-1])
    rpc.rpc_sync(f"worker{TRAINERS}", end, ("slow",))
    futures[-1].wait()
    futures = begin_all("killed", even, None, killed=1)
    slowest, steps, medians = 0.0, DISTURBED_STEPS, []
    for future in futures[1:]:
        durations = future.wait()
        steps = min(steps, len(durations))
        medians.append(statistics.median(durations))
        slowest = max(slowest, max(durations[KILLED_AT - 2 :]) - medians[-1])
    return {
        "step with quorum 3 of 4": usual,
        "the same, one trainer 10x slower": with_a_slow_one,
        "slow to usual": with_a_slow_one / usual,
        "longest wait after a kill": slowest,
        "steps of the others": steps,
    }


DISTURBED = harness.Benchmark(
    question="What does a slow trainer cost the others, and one that is killed?",
    figures=(
        Figure("step with quorum 3 of 4", "ms"),
        Figure("the same, one trainer 10x slower", "ms"),
        Figure("slow to usual", "ratio", (Bound(1.1, reference=None),)),
        Figure("longest wait after a kill", "ms", (Bound(100, reference=None),)),
        Figure("steps of the others", "of 60", (Bound(DISTURBED_STEPS, reference=None),), more_is_better=True),
    ),
    contenders=lambda: [jobs.FreshRpcJob(jobs.UCX, measure_disturbances, workers=1 + TRAINERS, kills=True)],
    rounds=3,
)
