"""How do other libraries do?

The echo of an array of 1 KB and of 64 MiB between two processes on one host: RPC on UCX and on TensorPipe, and beside
them UCXX's active messages, gRPC and mpi4py, where they are installed (``make bench-full`` installs them into an
environment of their own). By which lanes the bytes of each went is printed and kept; wrong lanes are a failure.

    BENCH_PEERS_PYTHON=.venv-peers/bin/python python -m benchmarks.others
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness
from benchmarks.harness import Figure
from benchmarks.large_tensors import echo

PROGRAMS = Path(__file__).with_name("peer_programs.py")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
# What each imports, and how its lanes must read.
MODULES = {
    "UCXX": "ucxx",
    "UCXX plain": "ucxx",
    "gRPC unix": "grpc",
    "gRPC tcp": "grpc",
    "mpi4py": "mpi4py",
    "mpi4py pickled": "mpi4py",
}
LANES = {
    "UCXX": "sysv|posix",
    "UCXX plain": "tcp",
    "gRPC unix": "unix",
    "gRPC tcp": "tcp",
    "mpi4py": "MPI",
    "mpi4py pickled": "MPI",
}


def python() -> str:
    return os.environ.get("BENCH_PEERS_PYTHON", "")


def is_installed(name: str) -> bool:
    if not python() or (MODULES[name] == "mpi4py" and shutil.which(MPIRUN[0]) is None):
        return False
    return subprocess.run([python(), "-c", f"import {MODULES[name]}"], capture_output=True, check=False).returncode == 0


def measure_other(name: str) -> harness.Figures:
    launcher = MPIRUN if MODULES[name] == "mpi4py" else ()
    with tempfile.TemporaryDirectory() as folder:
        log = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(Path(folder, "ucx"))} if MODULES[name] == "ucxx" else {}
        run = subprocess.run(
            [*launcher, python(), str(PROGRAMS), name],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, **log},
        )
    if run.returncode != 0:
        raise harness.ContenderFailed(f"{name}: {run.stderr[-2000:]}")
    figures: harness.Figures = json.loads(run.stdout.strip().splitlines()[-1])
    lanes = str(figures.pop("lanes"))
    if not re.search(LANES[name], lanes):
        raise harness.ContenderFailed(f"{name} went by {lanes}")
    harness.LANES[name] = lanes
    return figures


def measure() -> harness.Figures:
    figures = {}
    for name, size, calls in (("1 KB", 1024, 1000), ("64 MiB", 2**26, 7)):
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)
        durations = harness.durations_us(lambda tensor=tensor: rpc.rpc_sync("worker1", echo, (tensor,)), calls)
        figures[name] = harness.p50(durations)
    return figures


BENCHMARK = harness.Benchmark(
    question="How long does the echo of an array take with others?",
    figures=(Figure("1 KB", "us"), Figure("64 MiB", "us")),
    contenders=lambda: [
        *(harness.RpcJob(transport, measure) for transport in harness.ON_ONE_HOST),
        *(harness.Baseline(name, functools.partial(measure_other, name)) for name in MODULES if is_installed(name)),
    ],
    in_short_set=False,
)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    if not python():
        print("BENCH_PEERS_PYTHON names no Python: only RPC is measured", file=sys.stderr)
    sys.exit(main(["others"]))
