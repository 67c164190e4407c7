"""What do many workers on few cores cost?

Eight workers that all call all others at once; and the life of a job of 24 workers (and, where it can, of 64): how long
init_rpc takes, the first call of all pairs, and shutdown. Workers are forked from a process that has imported torch, so
that this measures RPC and not the import.
"""

from __future__ import annotations

import tempfile
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
    for stage in (
        lambda: rpc.init_rpc(f"w{rank}", backend=backend, rank=rank, world_size=workers, rpc_backend_options=options),
        lambda: call_all_others(1),
        rpc.shutdown,
    ):
        stages.wait()
        stage()
        reports.put(rank)


def live(transport: harness.Transport, workers: int) -> harness.Figures:
    """One job's life, in seconds; infinite where a stage does not end."""
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
        for process in processes:
            process.start()
        figures = {}
        try:
            for stage in ("init", "first calls", "shutdown"):
                stages.wait(timeout=LIFE_LIMIT_S)
                started = time.perf_counter()
                for _ in range(workers):
                    reports.get(timeout=LIFE_LIMIT_S)
                figures[f"{workers} workers, {stage}"] = time.perf_counter() - started
        finally:
            for process in processes:
                process.join(timeout=10)
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
        harness.RpcJob(transport, measure_all_pairs, workers=ALL_PAIRS_WORKERS)
        for transport in (harness.UCX, harness.TENSORPIPE)
    ],
)

LIFE = harness.Benchmark(
    question="What does the life of a job cost?",
    figures=(
        *(Figure(f"24 workers, {stage}", "s") for stage in ("init", "first calls", "shutdown")),
        Figure("24 workers, in sum", "s", (Bound(0.1),)),
        *(Figure(f"64 workers, {stage}", "s") for stage in ("init", "first calls", "shutdown")),
        Figure("64 workers, in sum", "s", (Bound(None, 5, reference=None),)),
    ),
    # TensorPipe's workers do not come up any more at 40.
    contenders=lambda: [Life(harness.UCX, 24, 64), Life(harness.TENSORPIPE, 24)],
    rounds=3,
)
