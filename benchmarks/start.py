"""Where does the time of a job's start go?

It runs the life of a job of many_workers.py. For each stage it says when the first, the median and the last worker have
finished. It also gives the CPU time, context switches and page faults of all workers together. On two cores a stage
takes at least half of that CPU time. The rest of a stage's time is waiting.

    python -m benchmarks.start [--workers 24] [--rounds 3] [--preload]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc

from benchmarks import jobs
from benchmarks.many_workers import LIFE_LIMIT_S, call_all_others, start_fork_server

STAGES = ("fork", "import", "init", "first calls", "shutdown")


class Moment(NamedTuple):
    """The time at which a worker ended a stage, since the job began, and what the worker has used by then."""

    at_s: float
    cpu_s: float
    switches: int
    faults: int


def now(began: float) -> Moment:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Moment(time.time() - began, used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw, used.ru_minflt)


def live(rank: int, workers: int, transport: jobs.Transport, store: str, began: float, reports: Any) -> None:
    moments = [now(began)]
    torch.set_num_threads(1)
    if transport.backend == "UCX":
        import torch_ucx_rpc  # noqa: F401  (makes "UCX" a backend)
    moments.append(now(began))
    options = transport.rpc_backend_options(init_method=store)
    backend = rpc.BackendType[transport.backend]
    stages: tuple[Callable[[], object], ...] = (
        lambda: rpc.init_rpc(f"w{rank}", backend=backend, rank=rank, world_size=workers, rpc_backend_options=options),
        lambda: call_all_others(1),
        rpc.shutdown,
    )
    for stage in stages:
        stage()
        moments.append(now(began))
    reports.put(moments)


def measure(transport: jobs.Transport, workers: int) -> list[list[Moment]]:
    """Return the moments of each worker."""
    reports = jobs.PROCESSES.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (workers, transport, Path(folder, "store").as_uri(), time.time(), reports)
        processes = [
            jobs.PROCESSES.Process(target=live, args=(rank, *arguments), daemon=True) for rank in range(workers)
        ]
        for process in processes:
            process.start()
        moments = [reports.get(timeout=LIFE_LIMIT_S) for _ in processes]
        for process in processes:
            process.join()
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preload", action="store_true", help="fork from a process that has imported the package")
    arguments = parser.parse_args()
    transports = (jobs.UCX,) if arguments.preload else (jobs.UCX, jobs.TENSORPIPE_UV)
    if arguments.preload:
        jobs.PROCESSES.set_forkserver_preload([*jobs.PRELOADED, "benchmarks.start", "torch_ucx_rpc"])
    start_fork_server()
    rounds = [[measure(transport, arguments.workers) for transport in transports] for _ in range(arguments.rounds)]
    print(f"{arguments.workers} workers; medians of {arguments.rounds} rounds")
    for index, transport in enumerate(transports):
        print(f"| {transport.name} | first, s | median, s | last, s | CPU time, s | switches | page faults |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for stage, name in enumerate(STAGES):
            print(f"| {name} | {' | '.join(row([turn[index] for turn in rounds], stage))} |")
        print()


def row(jobs: list[list[list[Moment]]], stage: int) -> list[str]:
    nothing = Moment(0, 0, 0, 0)
    columns: list[tuple[float, ...]] = []
    for workers in jobs:
        ends = sorted(moments[stage].at_s for moments in workers)
        used = [
            [
                after - before
                for before, after in zip(moments[stage - 1] if stage else nothing, moments[stage], strict=True)
            ]
            for moments in workers
        ]
        _, cpu, switches, faults = map(sum, zip(*used, strict=True))
        columns.append((ends[0], statistics.median(ends), ends[-1], cpu, switches, faults))
    *seconds, switches, faults = map(statistics.median, zip(*columns, strict=True))
    return [*(f"{value:.2f}" for value in seconds), f"{switches:,.0f}", f"{faults:,.0f}"]


if __name__ == "__main__":
    main()
