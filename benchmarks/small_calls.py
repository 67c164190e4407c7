"""How long does a small call take, and how fast do large tensors travel, on UCX and on TensorPipe?

Two worker processes on this machine per backend, both pairs alive at the same time, measured in turns, so that what
else the machine does strikes both alike. What is reported is the median over the rounds, with the range, and the ratio
of the medians.

    python benchmarks/small_calls.py [--rounds 7] [--calls 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

BACKENDS = ("UCX", "TENSORPIPE")


def nothing() -> None:
    """The callee of the smallest call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def percentiles_us(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of the duration of a call, in microseconds."""
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        durations.append(1e6 * (time.perf_counter() - started))
    durations.sort()
    return durations[count // 2], durations[count * 99 // 100]


def measure(calls: int) -> dict[str, float]:
    """One round on one backend: the name of each figure, with its unit, and the figure."""
    one, kilobyte, large = torch.ones(1), torch.ones(256), torch.ones(16 << 20)
    figures = {}
    figures["no-argument function, p50, us"], figures["no-argument function, p99, us"] = percentiles_us(
        lambda: rpc.rpc_sync("callee", nothing), calls
    )
    figures["torch.add, p50, us"], _ = percentiles_us(lambda: rpc.rpc_sync("callee", torch.add, (one, one)), calls)
    figures["echo of 1 KB, p50, us"], _ = percentiles_us(lambda: rpc.rpc_sync("callee", echo, (kilobyte,)), calls)
    started = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async("callee", nothing) for _ in range(calls)])
    figures["asynchronous calls, 1/s"] = calls / (time.perf_counter() - started)
    echo_us, _ = percentiles_us(lambda: rpc.rpc_sync("callee", echo, (large,)), 5)
    figures["echo of 64 MiB, both ways, GiB/s"] = 2 * large.nbytes / 2**30 / (1e-6 * echo_us)
    return figures


def work(rank: int, backend: str, store: str, calls: int, turns: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "UCX":
        from torch_ucx_rpc import UcxRpcBackendOptions as Options
    else:
        from torch.distributed.rpc import TensorPipeRpcBackendOptions as Options
    rpc.init_rpc(
        ("caller", "callee")[rank],
        backend=rpc.BackendType[backend],
        rank=rank,
        world_size=2,
        rpc_backend_options=Options(init_method=store),
    )
    if rank == 0:
        measure(min(calls, 200))  # warm-up: connections, code paths, pools
        turns.send("ready")
        while turns.recv() == "measure":
            turns.send(measure(calls))
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000, help="calls per figure and round")
    parser.add_argument("--json", type=Path, help="write every round of every figure")
    arguments = parser.parse_args()

    spawn = mp.get_context("spawn")
    processes, turns = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for backend in BACKENDS:
            turns[backend], theirs = spawn.Pipe()
            store = Path(directory, backend).as_uri()
            processes += [
                spawn.Process(target=work, args=(rank, backend, store, arguments.calls, theirs)) for rank in range(2)
            ]
        for process in processes:
            process.start()
        for backend in BACKENDS:
            turns[backend].recv()
        rounds: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for _ in range(arguments.rounds):
            for backend in BACKENDS:
                turns[backend].send("measure")
                rounds[backend].append(turns[backend].recv())
        for backend in BACKENDS:
            turns[backend].send("end")
        for process in processes:
            process.join()

    print(f"{'':36}{'UCX':>26}{'TensorPipe':>26}{'ratio':>8}")
    for name in rounds["UCX"][0]:
        columns, medians = "", []
        for backend in BACKENDS:
            values = sorted(figures[name] for figures in rounds[backend])
            medians.append(statistics.median(values))
            digits = 2 if values[-1] < 100 else 0
            columns += f"{f'{medians[-1]:.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})':>26}"
        print(f"{name:36}{columns}{medians[0] / medians[1]:>8.2f}")
    if arguments.json:
        machine = {"processor": platform.processor(), "system": platform.platform(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": rounds}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
