"""What do many workers on few cores cost?

Eight workers that all call all others at once; and the life of a job of 24 workers (and, where it can, of 64): how long
it takes until all run and have imported what they need, then init_rpc, the first call of all pairs, and shutdown.
Workers are forked from a process that has imported torch, with which TensorPipe comes: the first stage is the start of
the processes, and of this backend also its import.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness
from benchmarks.harness import Bound, Figure

ALL_PAIRS_WORKERS = 8
CALLS_PER_PAIR = 50
LIFE_LIMIT_S = 180
STAGES = ("start", "init", "first calls", "shutdown")


def nothing() -> None:
    """The callee of the smallest call."""


def call_all_others(calls: int) -> None:
    """Of this worker to every other, all at once, ``calls`` times each."""
    others = [info.id for info in rpc.api._get_current_rpc_agent().get_worker_infos()]
    me = rpc.get_worker_info().id
    torch.futures.wait_all([rpc.rpc_async(rank, nothing) for _ in range(calls) for rank in others if rank != me])


def measure_all_pairs() -> harness.Figures:
    ranks = range(ALL_PAIRS_WORKERS)
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async(rank, call_all_others, (CALLS_PER_PAIR,)) for rank in ranks])
    return {"8 workers, all pairs at once": 1e3 * (time.perf_counter() - started)}


def _live(rank: int, workers: int, transport: harness.Transport, store: str, stages: Any, reports: Any) -> None:
    torch.set_num_threads(1)
    if transport.backend == "UCX":
        import torch_ucx_rpc  # noqa: F401  (makes "UCX" a backend)
    options = transport.rpc_backend_options(init_method=store)
    backend = rpc.BackendType[transport.backend]
    reports.put(rank)
    for stage in (
        lambda: rpc.init_rpc(f"w{rank}", backend=backend, rank=rank, world_size=workers, rpc_backend_options=options),
        lambda: call_all_others(1),
        rpc.shutdown,
    ):
        stages.wait()
        stage()
        reports.put(rank)


def live(transport: harness.Transport, workers: int) -> harness.Figures:
    """One job's life, in seconds; `harness.ContenderFailed` where a stage does not end in LIFE_LIMIT_S."""
    stages = harness.PROCESSES.Barrier(workers + 1)
    reports = harness.PROCESSES.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        processes = [
            harness.PROCESSES.Process(
                target=_live, args=(rank, workers, transport, store, stages, reports), daemon=True
            )
            for rank in range(workers)
        ]
        figures = {}
        stage = ""
        is_over = False
        try:
            for stage in STAGES:
                if stage == "start":
                    started = time.perf_counter()
                    for process in processes:
                        process.start()
                else:
                    stages.wait(timeout=LIFE_LIMIT_S)
                    started = time.perf_counter()
                for _ in range(workers):
                    reports.get(timeout=LIFE_LIMIT_S)
                figures[f"{workers} workers, {stage}"] = time.perf_counter() - started
            is_over = True
        except (queue.Empty, threading.BrokenBarrierError) as error:
            raise harness.ContenderFailed(
                f"{workers} workers did not get through {stage!r} in {LIFE_LIMIT_S} s"
            ) from error
        finally:
            give_up_at = time.monotonic() + (10 if is_over else 0)
            for process in processes:
                if process.pid is None:
                    continue
                process.join(timeout=max(0.0, give_up_at - time.monotonic()))
                if process.exitcode is None:
                    process.kill()
    figures[f"{workers} workers, in sum"] = sum(figures.values())
    return figures


class Life(harness.Baseline):
    """A job that lives and ends in every round."""

    def __init__(self, transport: harness.Transport, *sizes: int) -> None:
        super().__init__(
            transport.name,
            lambda: {name: value for workers in sizes for name, value in live(transport, workers).items()},
        )


ALL_PAIRS = harness.Benchmark(
    question="What do eight workers on few cores cost?",
    figures=(Figure("8 workers, all pairs at once", "ms", (Bound(0.7, 0.4),)),),
    contenders=lambda: [
        harness.RpcJob(transport, measure_all_pairs, workers=ALL_PAIRS_WORKERS) for transport in harness.ON_ONE_HOST
    ],
)

LIFE = harness.Benchmark(
    question="What does the life of a job cost?",
    figures=(
        *(Figure(f"24 workers, {stage}", "s") for stage in STAGES),
        Figure("24 workers, in sum", "s", (Bound(0.1, reference=harness.TENSORPIPE.name), Bound(0.8, 0.5))),
        *(Figure(f"64 workers, {stage}", "s") for stage in STAGES),
        Figure("64 workers, in sum", "s", (Bound(None, 5, reference=None), Bound(0.8, 0.5))),
    ),
    # With its transport for one host TensorPipe's workers do not come up any more at 40.
    contenders=lambda: [
        Life(harness.UCX, 24, 64),
        Life(harness.TENSORPIPE, 24),
        Life(harness.TENSORPIPE_UV, 24, 64),
    ],
    rounds=3,
)
