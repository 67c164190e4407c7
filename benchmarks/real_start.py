"""What do rendezvous and shutdown of many workers cost on one machine? Forked workers that import nothing further.

    python benchmarks/real_start.py 64 128 256 512
    python benchmarks/real_start.py 256 --against FOLDER --rounds 3    in turns with the package built in that folder
    python benchmarks/real_start.py 256 --simulated                    then the simulation of the same

Each job is a process that has imported torch and the package, and forks the workers. They share the processors. The
simulation (simulated_start.py) gets the CPU time of a worker, divided by the number of processors. Then it must give
the same time and bytes to within 30 %. Memory is the private pages of one worker.

Only the Store uses the loopback interface here, and the kernel counts the bytes. If other programs use that interface
too:

    unshare --net sh -c 'ip link set lo up; python benchmarks/real_start.py 256'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
COLUMNS = ("init, s", "CPU of a worker, s", "Store, MB", "worker, MiB", "shutdown, s", "workers met", "files")


def job(workers: int) -> dict[str, float]:
    """Run one job. Return totals, a mean, and figures of the busiest worker."""
    import gc
    import time

    import torch.distributed.rpc  # noqa: F401

    import torch_ucx_rpc  # noqa: F401

    gc.freeze()
    # The limit must allow the sockets of all workers in this process, and the processes that rank 0 watches.
    files = max(1024, 4 * workers + 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, max(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        ends: list[socket.socket] = []
        for rank in range(workers):
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                for end in (ours, *ends):
                    end.close()
                work(rank, workers, url, theirs)
            theirs.close()
            ends.append(ours)
        reports: dict[str, list[dict[str, float]]] = {}
        totals: dict[str, float] = {}
        for step in ("ready", "init", "memory", "shutdown"):
            began, before = time.perf_counter(), loopback_bytes()
            for end in ends:
                end.sendall(b"!")
            lines = [end.makefile("r").readline() for end in ends]
            totals |= {f"{step}, s": time.perf_counter() - began, f"{step}, bytes": loopback_bytes() - before}
            if not all(lines):
                raise RuntimeError(f"{lines.count('')} workers have failed in {step}; their output says why")
            reports[step] = [json.loads(line) for line in lines]
        for _ in ends:
            os.wait()
    return {
        "init, s": totals["init, s"],
        "CPU of a worker, s": statistics.fmean(report["cpu"] for report in reports["init"]),
        "Store, MB": totals["init, bytes"] / 1e6,
        "worker, MiB": max(report["memory"] for report in reports["memory"]),
        "shutdown, s": totals["shutdown, s"],
        "workers met": max(report["met"] for report in reports["shutdown"]),
        "files": max(report["files"] for report in reports["shutdown"]),
    }


def work(rank: int, workers: int, url: str, orders: socket.socket) -> None:
    import torch
    import torch.distributed.rpc as rpc

    import torch_ucx_rpc
    from torch_ucx_rpc._agent import UcxRpcAgent

    torch.set_num_threads(1)
    options = torch_ucx_rpc.UcxRpcBackendOptions(init_method=url, init_timeout=LIMIT_S)
    last: dict[str, float] = {}
    shut_down = UcxRpcAgent.shutdown

    def count_and_shut_down(agent: Any) -> None:
        if not last:
            met = sum(1 for peer in torch_ucx_rpc.statistics().peers if peer.lanes)
            last.update(met=met, files=len(list(Path("/proc/self/fd").iterdir())))
        shut_down(agent)

    # When the agent is about to end, it has met all workers that it will meet.
    UcxRpcAgent.shutdown = count_and_shut_down  # type: ignore[assignment, method-assign]
    try:
        orders.recv(1)
        orders.sendall(b"{}\n")
        orders.recv(1)
        before = cpu_s()
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
        orders.sendall(json.dumps({"cpu": cpu_s() - before}).encode() + b"\n")
        orders.recv(1)
        # Reading the memory is a separate step, since it takes a worker longer than init_rpc.
        orders.sendall(json.dumps({"memory": private_mib()}).encode() + b"\n")
        orders.recv(1)
        rpc.shutdown()
        orders.sendall(json.dumps(last).encode() + b"\n")
    finally:
        orders.close()
        os._exit(0)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def private_mib() -> float:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_(?:Clean|Dirty): +(\d+)", text, re.MULTILINE))) / 1024


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def measure(package: Path, workers: int) -> dict[str, float]:
    # This setting leaves the loopback interface to the Store.
    environ = {**os.environ, "PYTHONPATH": str(package), "UCX_TLS": "sm,self", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--job", str(workers)]
    done = subprocess.run(command, env=environ, cwd=package, stdout=subprocess.PIPE, check=True, timeout=2 * LIMIT_S)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="*")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another build of the package")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--simulated", action="store_true", help="compare with the simulation")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(job(arguments.job)))
        return
    packages = {"this": ROOT, **({"other": arguments.against.resolve()} if arguments.against else {})}
    repeats = arguments.rounds
    print("| workers | package | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for workers in arguments.workers:
        rounds = [{name: measure(package, workers) for name, package in packages.items()} for _ in range(repeats)]
        for name in packages:
            row = [statistics.median(each[name][column] for each in rounds) for column in COLUMNS]
            print(f"| {workers} | {name} | " + " | ".join(f"{value:.4g}" for value in row) + " |", flush=True)
        if arguments.simulated:
            compare(workers, {column: statistics.median(each["this"][column] for each in rounds) for column in COLUMNS})


def compare(workers: int, real: dict[str, float]) -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks import simulated_start

    found = simulated_start.rendezvous(workers, 0, 0, 0, real["CPU of a worker, s"] / len(os.sched_getaffinity(0)))
    simulated = {"init, s": found["seconds"], "Store, MB": (found["sent"] + found["taken"]) / 1e6}
    for column, value in simulated.items():
        print(
            f"{workers} workers, {column}: real {real[column]:.3g}, simulated {value:.3g}, {value / real[column]:.2f}"
        )


if __name__ == "__main__":
    main()
