"""What does one more worker cost: time to start, and memory and open files for each peer?

All workers are on this machine, each in its own interpreter. They start together, each calls every other once, and they
shut down together. For each number of workers, the program reports the wall time of the three steps. It also reports
memory and open files at rest and after all calls: the median over the workers, and the lowest and highest. Memory is
the proportional share (Pss), in which memory that processes share counts once.

    python benchmarks/scaling.py [--workers 2 4 8 16 32 64] [--tcp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

MIB = 1 << 20
# The limit of each step of a worker.
LIMIT_S = 600


def nothing() -> None:
    """The callee of the smallest call."""


def footprint() -> dict[str, float]:
    found = re.search(r"^Pss: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/smaps_rollup has no Pss")
    return {"memory, MiB": int(found[1]) * 1024 / MIB, "open files": len(list(Path("/proc/self/fd").iterdir()))}


def work(rank: int, size: int, store: str, orders: Connection) -> None:
    import torch_ucx_rpc

    torch.set_num_threads(1)
    options = torch_ucx_rpc.UcxRpcBackendOptions(init_method=store, rpc_timeout=600)
    for order in iter(orders.recv, None):
        started = time.perf_counter()
        if order == "start":
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        elif order == "call":
            torch.futures.wait_all([rpc.rpc_async(peer, nothing) for peer in range(size) if peer != rank])
        elif order == "shut down":
            rpc.shutdown()
        orders.send({"seconds": time.perf_counter() - started, **footprint()})


def run(size: int) -> dict[str, list[dict[str, float]]]:
    """Return the report of each worker after each step."""
    spawn = mp.get_context("spawn")
    steps = {}
    # This socket does not listen, so it reserves the port for rank 0.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        ends = [spawn.Pipe() for _ in range(size)]
        workers = [
            spawn.Process(target=work, args=(rank, size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for worker in workers:
            worker.start()
        for _, theirs in ends:
            # Only the worker keeps a copy, so this process notices the worker's end.
            theirs.close()
        for step in ("import", "start", "call", "shut down"):
            started = time.perf_counter()
            for ours, _ in ends:
                ours.send(step)
            steps[step] = [receive(ours, step) for ours, _ in ends]
            # The last entry is the time of all workers together.
            steps[step].append({"seconds": time.perf_counter() - started})
        for ours, _ in ends:
            ours.send(None)
        for worker in workers:
            worker.join(timeout=60)
            if worker.exitcode is None:
                worker.kill()
    return steps


def receive(ours: Connection, step: str) -> dict[str, float]:
    if not ours.poll(LIMIT_S):
        raise TimeoutError(f"a worker has not got through {step!r} in {LIMIT_S} s")
    figures: dict[str, float] = ours.recv()
    return figures


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=1, help="times each number is measured (default: 1)")
    parser.add_argument("--tcp", action="store_true", help="use TCP, as between hosts, instead of shared memory")
    parser.add_argument("--json", type=Path, help="write every figure of every worker")
    arguments = parser.parse_args()
    if arguments.tcp:
        os.environ["UCX_TLS"] = "tcp,self"

    rounds: dict[int, list[dict[str, list[dict[str, float]]]]] = {}
    print("wall time of each step; median (range)")
    print(f"{'workers':>7} {'start, s':>17} {'all pairs, s':>17} {'shut down, s':>17} ", end="")
    print(f"{'memory at rest, MiB':>22} {'per peer, KiB':>14} {'files at rest':>16} {'per peer':>9}")
    for size in arguments.workers:
        rounds[size] = [run(size) for _ in range(arguments.rounds)]
        walls = [[steps[step][-1]["seconds"] for steps in rounds[size]] for step in ("start", "call", "shut down")]
        print(f"{size:>7} " + " ".join(f"{spread(wall):>17}" for wall in walls), end=" ")
        for figure, scale, digits in (("memory, MiB", 1024, 0), ("open files", 1, 2)):
            before = [worker[figure] for steps in rounds[size] for worker in steps["start"][:-1]]
            after = [worker[figure] for steps in rounds[size] for worker in steps["call"][:-1]]
            per_peer = (statistics.median(after) - statistics.median(before)) * scale / (size - 1)
            print(f"{spread(before):>22} {per_peer:>14.{digits}f}", end=" ", flush=True)
        print()
    if arguments.json:
        machine = {"processor": platform.processor(), "system": platform.platform(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": rounds}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
