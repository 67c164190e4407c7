"""What does a checkpoint cost the trainers?

* PAUSE: two stages of 128 MiB each. In a synchronous save the caller waits for the files, in an asynchronous one only
  until all values are copied.
* MEMORY: how much a worker's memory grows while it saves its part and while it reads it, as a share of the part. Each
  worker has a quarter of the model, so holding another worker's part would count as 1.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.rpc as rpc
from torch import nn

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.pipelines import forget_peak, peak_and_present_bytes

LAYERS, WIDTH = 32, 1024
STAGES = 4
SAVES = 3


def _pipe(workers: int, layers: int) -> Any:
    from torch_ucx_rpc import pipeline

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return pipeline.DistributedPipeline(model, [f"worker{number}" for number in range(1, workers + 1)])


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def pause() -> harness.Figures:
    from torch_ucx_rpc import checkpoint

    pipe = _pipe(2, 2 * LAYERS)
    waits, pauses = [], []
    with tempfile.TemporaryDirectory() as folder:
        # The first save of each kind prepares memory and the folder.
        for _ in range(SAVES + 1):
            waits.append(_seconds(lambda: checkpoint.save({"model": pipe}, Path(folder, "waited")))[0])
            took, future = _seconds(lambda: checkpoint.save({"model": pipe}, Path(folder, "behind"), asynchronous=True))
            pauses.append(took)
            future.wait()
    pipe.close()
    return {
        "a save that is waited for, 256 MiB": statistics.median(waits[1:]),
        "the pause of an asynchronous save, 256 MiB": statistics.median(pauses[1:]),
        "the pause, of the time that is waited": statistics.median(
            mine / theirs for mine, theirs in zip(pauses[1:], waits[1:], strict=True)
        ),
    }


PAUSE = harness.Benchmark(
    question="How long does a checkpoint stop training?",
    figures=(
        Figure("a save that is waited for, 256 MiB", "s"),
        Figure("the pause of an asynchronous save, 256 MiB", "s"),
        Figure("the pause, of the time that is waited", "times", (Bound(0.1, reference=None),)),
    ),
    contenders=lambda: [jobs.RpcJob(jobs.UCX, pause, workers=3)],
    rounds=5,
    in_short_set=False,
)


def memory() -> harness.Figures:
    from torch_ucx_rpc import checkpoint

    pipe = _pipe(STAGES, STAGES * LAYERS)
    own = 4.0 * WIDTH * WIDTH * LAYERS
    workers = [f"worker{number}" for number in range(1, STAGES + 1)]
    with tempfile.TemporaryDirectory() as folder:

        def growth(call: Callable[[], object]) -> float:
            for worker in workers:
                rpc.rpc_sync(worker, forget_peak)
            before = {worker: rpc.rpc_sync(worker, peak_and_present_bytes)[1] for worker in workers}
            call()
            most: int = max(rpc.rpc_sync(worker, peak_and_present_bytes)[0] - before[worker] for worker in workers)
            return most / own

        # First save and load once, so that imports do not count.
        checkpoint.save({"model": pipe}, Path(folder, "first"))
        checkpoint.load({"model": pipe}, Path(folder, "first"))
        saving = growth(lambda: checkpoint.save({"model": pipe}, Path(folder, "second")))
        reading = growth(lambda: checkpoint.load({"model": pipe}, Path(folder, "second")))
    pipe.close()
    return {"growth while saving": saving, "growth while reading": reading}


MEMORY = harness.Benchmark(
    question="How far does a worker's memory grow by a checkpoint, of its own part?",
    figures=(
        Figure("growth while saving", "times", (Bound(0.1, reference=None),)),
        Figure("growth while reading", "times", (Bound(0.1, reference=None),)),
    ),
    contenders=lambda: [jobs.RpcJob(jobs.UCX, memory, workers=STAGES + 1)],
    rounds=3,
    in_short_set=False,
)
