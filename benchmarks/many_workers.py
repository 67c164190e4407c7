"""What do many workers on few cores cost?

First, eight workers each call all others at once. Second, the life of a job of 2, 8, 24 and 64 workers, in stages: the
start of all processes with their imports, init_rpc, the first call of all pairs, shutdown. Workers are forked from a
process that has imported torch, which contains TensorPipe. So only on UCX the first stage includes an import of the
backend. The workers of "UCX, preloaded" are forked from a process that has also imported this package, as a program's
own fork server may.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

ALL_PAIRS_WORKERS = 8
CALLS_PER_PAIR = 50
LIFE_LIMIT_S = 180
STAGES = ("start", "init", "first calls", "shutdown")


def nothing() -> None:
    """The callee of the smallest call."""


def call_all_others(calls: int) -> None:
    """Make ``calls`` calls from this worker to each other worker, all at once."""
    others = [info.id for info in _get_current_rpc_agent().get_worker_infos()]
    me = rpc.get_worker_info().id
    torch.futures.wait_all([rpc.rpc_async(rank, nothing) for _ in range(calls) for rank in others if rank != me])


def measure_all_pairs() -> harness.Figures:
    ranks = range(ALL_PAIRS_WORKERS)
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async(rank, call_all_others, (CALLS_PER_PAIR,)) for rank in ranks])
    return {"8 workers, all pairs at once": 1e3 * (time.perf_counter() - started)}


def _live(rank: int, workers: int, transport: jobs.Transport, store: str, stages: Any, reports: Any) -> None:
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


def live(transport: jobs.Transport, workers: int) -> harness.Figures:
    """Return the stages of one job's life, in seconds. Raise `harness.ContenderFailed` if a stage does not end in
    LIFE_LIMIT_S."""
    stages = jobs.PROCESSES.Barrier(workers + 1)
    reports = jobs.PROCESSES.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        processes = [
            jobs.PROCESSES.Process(target=_live, args=(rank, workers, transport, store, stages, reports), daemon=True)
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


class Life(jobs.Baseline):
    """A job that starts and ends in every round."""

    def __init__(self, transport: jobs.Transport, *sizes: int) -> None:
        super().__init__(transport.name, lambda: lives(transport, *sizes))

    def __enter__(self) -> Life:
        start_fork_server()
        return self


def lives(transport: jobs.Transport, *sizes: int) -> harness.Figures:
    return {name: value for workers in sizes for name, value in live(transport, workers).items()}


def start_fork_server() -> None:
    """Start the fork server, so that its import of torch counts for no worker."""
    process = jobs.PROCESSES.Process(target=nothing)
    process.start()
    process.join()


def preloaded_lives(*sizes: int) -> harness.Figures:
    program = f"from benchmarks import many_workers; many_workers.print_preloaded_lives(*{sizes})"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIFE_LIMIT_S,
    )
    if run.returncode != 0:
        raise harness.ContenderFailed(run.stderr[-2000:])
    figures: harness.Figures = json.loads(run.stdout)
    return figures


def print_preloaded_lives(*sizes: int) -> None:
    """Measure in a separate program, since a process has only one fork server."""
    jobs.PROCESSES.set_forkserver_preload([*jobs.PRELOADED, "torch_ucx_rpc"])
    start_fork_server()
    print(json.dumps(lives(jobs.UCX, *sizes)))


SIZES = (2, 8, 24, 64)
# On TensorPipe with its transport for one host, jobs of 40 workers do not start.
SIZES_OF_TENSORPIPE = (2, 8, 24)
PRELOADED = "UCX, preloaded"


def bounds_of(workers: int) -> tuple[Bound, ...]:
    bounds: tuple[Bound, ...] = (Bound(0.6, 0.4) if workers >= 24 else Bound(None),)
    if workers in SIZES_OF_TENSORPIPE:
        bounds += (Bound(None, reference=jobs.TENSORPIPE.name),)
    return (*bounds, Bound(None, contender=PRELOADED))


ALL_PAIRS = harness.Benchmark(
    question="What do eight workers on few cores cost?",
    figures=(Figure("8 workers, all pairs at once", "ms", (Bound(0.7, 0.4),)),),
    contenders=lambda: [
        jobs.RpcJob(transport, measure_all_pairs, workers=ALL_PAIRS_WORKERS) for transport in jobs.ON_ONE_HOST
    ],
)

LIFE = harness.Benchmark(
    question="What does the life of a job cost?",
    figures=tuple(
        figure
        for workers in SIZES
        for figure in (
            *(Figure(f"{workers} workers, {stage}", "s") for stage in STAGES),
            Figure(f"{workers} workers, in sum", "s", bounds_of(workers)),
        )
    ),
    contenders=lambda: [
        Life(jobs.UCX, *SIZES),
        Life(jobs.TENSORPIPE, *SIZES_OF_TENSORPIPE),
        Life(jobs.TENSORPIPE_UV, *SIZES),
        jobs.Baseline(PRELOADED, lambda: preloaded_lives(*SIZES)),
    ],
    rounds=3,
)
