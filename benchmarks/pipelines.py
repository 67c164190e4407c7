"""What does a pipeline cost beside PyTorch's own?

* TUTORIAL: the model of PyTorch's pipeline tutorial (examples/tutorials/pipeline_parallel.py), whose driver calls each
  stage for each micro-batch. It is compared with `DistributedPipeline`, and with torch.distributed.pipelining on gloo
  with the same schedule.
* MAKESPAN: eight stages that sleep for 5 ms in the forward and 10 ms in the backward, compared with the ideal of the
  schedule. The ideal uses the real durations of the sleeps.
* REMATERIALIZATION: time and memory of a step that keeps activations, and of one that computes them again. The ratio of
  the times depends on the model. So it is compared with that of the same model in one process with
  `torch.utils.checkpoint`.
* RECOVERY: a stage is killed in a step. How long does that step take until a spare has taken over?
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

STEPS = 30
MICRO_BATCHES = 6
TUTORIAL_FIGURE = "a step of the tutorial's model, 6 micro-batches"


def tutorial_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))


def tutorial_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    inputs = torch.randn(24, 8)
    return inputs, inputs.mean(dim=1, keepdim=True)


def step_ms(step: Callable[[], object], count: int = STEPS) -> float:
    for _ in range(5):
        step()
    return harness.p50(harness.durations_us(step, count)) / 1e3


# ------------------------------------------------------------------------------------------------- the tutorial's


class Shard(nn.Module):
    """A stage that fetches its input from the input's owner, as in the tutorial."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = tutorial_model()[first:last]

    def forward(self, batch: rpc.RRef[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch.to_here())
        return output

    def parameter_rrefs(self) -> list[rpc.RRef[torch.Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def tutorial() -> harness.Figures:
    first, second = rpc.remote("worker1", Shard, args=(0, 2)), rpc.remote("worker2", Shard, args=(2, 5))
    parameters = [*first.rpc_sync().parameter_rrefs(), *second.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    inputs, targets = tutorial_batch()

    def step() -> None:
        with dist_autograd.context() as context:
            outputs = []
            for part in inputs.split(len(inputs) // MICRO_BATCHES):
                between = first.remote().forward(rpc.RRef(part))
                outputs.append(second.rpc_async().forward(between))
            loss = nn.functional.mse_loss(torch.cat(torch.futures.wait_all(outputs)), targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]  # not in torch's __all__
            optimizer.step(context)

    return {TUTORIAL_FIGURE: step_ms(step)}


def ours(schedule: str) -> harness.Figures:
    from torch_ucx_rpc import pipeline

    pipe = pipeline.DistributedPipeline(
        tutorial_model(),
        ["worker1", "worker2"],
        balance=[2, 3],
        schedule=schedule,
        chunks=MICRO_BATCHES,
        loss=nn.functional.mse_loss,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    inputs, targets = tutorial_batch()

    def step() -> None:
        pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()

    took = step_ms(step)
    pipe.close()
    return {TUTORIAL_FIGURE: took}


class GlooPipeline:
    """torch.distributed.pipelining on gloo: two processes with a stage each begin each step together."""

    name = "torch pipelining, gloo"

    def __enter__(self) -> GlooPipeline:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store").as_uri()
        self._turns, theirs = jobs.PROCESSES.Pipe()
        self._processes = [
            jobs.PROCESSES.Process(target=_gloo_stage, args=(rank, store, theirs), daemon=True) for rank in range(2)
        ]
        for process in self._processes:
            process.start()
        theirs.close()
        self._turns.recv()
        self._signal(signal.SIGSTOP)
        return self

    def measure(self) -> harness.Figures:
        self._signal(signal.SIGCONT)
        self._turns.send("measure")
        figures: harness.Figures = self._turns.recv()
        self._signal(signal.SIGSTOP)
        return figures

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)


def _gloo_stage(rank: int, store: str, turns: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=store)
    layers = tutorial_model()
    module = layers[:2] if rank == 0 else layers[2:]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs, targets = tutorial_batch()

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()
        optimizer.zero_grad()
        # Our step returns when the driver has the loss. So here the first stage waits until the last one has it.
        dist.barrier()

    if rank == 1:
        turns.send("ready")
    while True:
        orders = [turns.recv() if rank == 1 else None]
        dist.broadcast_object_list(orders, src=1)
        took = step_ms(step)
        if rank == 1:
            turns.send({TUTORIAL_FIGURE: took})


def _job(name: str, transport: jobs.Transport, measure: Callable[[], harness.Figures], workers: int = 3) -> jobs.RpcJob:
    job = jobs.RpcJob(transport, measure, workers=workers)
    job.name = name
    return job


OURS_ON_TENSORPIPE = ("ours, TensorPipe", "ours, TensorPipe, uv")
TUTORIAL_ON_TENSORPIPE = ("tutorial, TensorPipe", "tutorial, TensorPipe, uv")

TUTORIAL = harness.Benchmark(
    question="What does a step of a pipeline cost?",
    figures=(
        Figure(
            TUTORIAL_FIGURE,
            "ms",
            (
                Bound(0.5, 0.4, contender="ours, UCX", reference="tutorial, UCX"),
                Bound(0.8, contender="ours, UCX", reference=GlooPipeline.name),
                Bound(None, contender="ours, UCX", reference=OURS_ON_TENSORPIPE),
                Bound(None, contender=OURS_ON_TENSORPIPE[0], reference=TUTORIAL_ON_TENSORPIPE),
            ),
        ),
    ),
    rounds=11,
    contenders=lambda: [
        _job("ours, UCX", jobs.UCX, functools.partial(ours, "1F1B")),
        _job("tutorial, UCX", jobs.UCX, tutorial),
        GlooPipeline(),
        _job("ours, TensorPipe", jobs.TENSORPIPE, functools.partial(ours, "1F1B")),
        _job("tutorial, TensorPipe", jobs.TENSORPIPE, tutorial),
        _job("ours, TensorPipe, uv", jobs.TENSORPIPE_UV, functools.partial(ours, "1F1B")),
        _job("tutorial, TensorPipe, uv", jobs.TENSORPIPE_UV, tutorial),
    ],
)


# ------------------------------------------------------------------------------------------------------- makespan

STAGES = 8
FORWARD_S, BACKWARD_S = 0.005, 0.010


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(value * self.weight)
        return slept


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def _sleeps_s() -> float:
    """Return the duration of the two sleeps on this machine now."""

    def measured(seconds: float) -> float:
        durations = []
        for _ in range(20):
            begin = time.perf_counter()
            time.sleep(seconds)
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations)

    return measured(FORWARD_S) + measured(BACKWARD_S)


def makespan() -> harness.Figures:
    from torch_ucx_rpc import pipeline

    figures = {}
    workers = [f"worker{number}" for number in range(1, STAGES + 1)]
    for micro_batches in (8, 16, 32):
        pipe = pipeline.DistributedPipeline(
            [Sleeper() for _ in range(STAGES)], workers, schedule="1F1B", chunks=micro_batches, loss=_mean
        )
        batch = torch.ones(micro_batches, 1)
        pipe.step(batch)
        ratios = []
        for _ in range(3):
            # The first micro-batch goes through all stages and back, and the others follow one by one.
            ideal = (micro_batches + STAGES - 1) * _sleeps_s()
            begin = time.perf_counter()
            pipe.step(batch)
            ratios.append((time.perf_counter() - begin) / ideal)
        figures[f"{micro_batches} micro-batches through 8 sleeping stages, of the ideal"] = statistics.median(ratios)
        pipe.close()
    return figures


MAKESPAN = harness.Benchmark(
    question="How near is a schedule to its ideal?",
    figures=tuple(
        Figure(
            f"{micro_batches} micro-batches through 8 sleeping stages, of the ideal",
            "times",
            (Bound(1.05, reference=None),),
        )
        for micro_batches in (8, 16, 32)
    ),
    contenders=lambda: [_job(one.name, one, makespan, STAGES + 1) for one in (jobs.UCX, jobs.TENSORPIPE)],
    rounds=3,
    in_short_set=False,
)


# ---------------------------------------------------------------------------------------------- rematerialization

DEPTH, WIDTH, ROWS, CHUNKS = 24, 512, 4096, 8
REMATERIALIZATION_TIME = "time with rematerialization"
IN_ONE_PROCESS = "torch, one process"


def peak_and_present_bytes() -> tuple[float, float]:
    """Return the peak of this process's memory, and its present size."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024.0 * int(peak.split()[1]), float(now)


def forget_peak() -> None:
    # Reused memory of earlier steps would hide the growth.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def _squared(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


_M_MMAP_THRESHOLD = -3  # malloc.h


def _count_exactly() -> None:
    """Make this process return memory as soon as it is free, except small blocks."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)


def _both_ways(worker: str) -> dict[bool, Any]:
    """Return two pipelines of one stage that have made a step. The key says whether the pipeline rematerializes."""
    from torch_ucx_rpc import pipeline

    pipes = {
        again: pipeline.DistributedPipeline(
            _layers(), [worker], schedule="gpipe", chunks=CHUNKS, rematerialize=again, loss=_squared
        )
        for again in (False, True)
    }
    for pipe in pipes.values():
        pipe.step(torch.randn(ROWS, WIDTH))
    return pipes


def rematerialization() -> harness.Figures:
    batch = torch.randn(ROWS, WIDTH)
    ratios, times, kept = [], {}, {}
    pipes = _both_ways("worker1")
    for _ in range(3):
        for again, pipe in pipes.items():
            begin = time.perf_counter()
            pipe.step(batch)
            times[again] = time.perf_counter() - begin
        ratios.append(times[True] / times[False])
    # A separate worker measures memory. It returns freed memory at once.
    rpc.rpc_sync("worker2", _count_exactly)
    for again, pipe in _both_ways("worker2").items():
        rpc.rpc_sync("worker2", forget_peak)
        before = rpc.rpc_sync("worker2", peak_and_present_bytes)[1]
        pipe.step(batch)
        kept[again] = rpc.rpc_sync("worker2", peak_and_present_bytes)[0] - before
    return {
        REMATERIALIZATION_TIME: statistics.median(ratios),
        "activations with rematerialization": kept[True] / kept[False],
    }


def rematerialization_in_one_process() -> harness.Figures:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers, batch = _layers(), torch.randn(ROWS, WIDTH)
        again = functools.partial(checkpoint, layers, use_reentrant=False)

        def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> float:
            begin = time.perf_counter()
            losses = [_squared(forward(part)) for part in batch.split(ROWS // CHUNKS)]
            for loss in losses:
                loss.backward()
            return time.perf_counter() - begin

        step(layers)
        return {REMATERIALIZATION_TIME: statistics.median(step(again) / step(layers) for _ in range(3))}
    finally:
        torch.set_num_threads(threads)


REMATERIALIZATION = harness.Benchmark(
    question="What does rematerialization cost and save, with 8 micro-batches?",
    figures=(
        Figure(REMATERIALIZATION_TIME, "times", (Bound(1.05, reference=IN_ONE_PROCESS),)),
        Figure("activations with rematerialization", "times", (Bound(1 / CHUNKS + 0.1, reference=None),)),
    ),
    contenders=lambda: [
        jobs.RpcJob(jobs.UCX, rematerialization, workers=3),
        jobs.Baseline(IN_ONE_PROCESS, rematerialization_in_one_process),
    ],
    rounds=3,
    in_short_set=False,
)


# ------------------------------------------------------------------------------------------------------- recovery


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def recovery() -> harness.Figures:
    from torch_ucx_rpc import pipeline

    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline.DistributedPipeline(
            tutorial_model(), ["worker1", "worker2"], chunks=4, loss=nn.functional.mse_loss, spares=["worker3"]
        )
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        inputs, targets = tutorial_batch()
        pipe.save(folder)
        for _ in range(10):
            pipe.step(inputs, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        pipe.synchronize()
        rpc.rpc_async("worker2", _die)
        begin = time.perf_counter()
        pipe.step(inputs, target=targets)
        return {"a step in which a stage is killed and a spare takes over": time.perf_counter() - begin}


RECOVERY = harness.Benchmark(
    question="How long is the pause when a stage dies?",
    figures=(Figure("a step in which a stage is killed and a spare takes over", "s", (Bound(5.0, reference=None),)),),
    contenders=lambda: [jobs.FreshRpcJob(jobs.UCX, recovery, workers=4, kills=True)],
    rounds=3,
    in_short_set=False,
)


if __name__ == "__main__":
    for benchmark in (TUTORIAL, MAKESPAN, REMATERIALIZATION, RECOVERY):
        print("\n".join(harness.table(harness.run(benchmark))), end="\n\n")
    sys.exit()
