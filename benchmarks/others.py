"""How do other libraries do?

Two processes on one host echo an array of 1 KB, an array of 64 MiB, and 1, 10 and 100 arrays of 1 KB at once. They use
RPC on UCX and on TensorPipe, and the installed ones of Gloo, UCXX's active messages, gRPC, mpi4py, Ray and Monarch.
``tools/record_benchmarks.sh`` installs these into a separate environment. The benchmark prints and keeps the lanes that
carried the bytes. Wrong lanes are a failure. `peers` has a program for each library.

    BENCH_PEERS_PYTHON=.venv-peers/bin/python python -m benchmarks.others
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Figure
from benchmarks.large_tensors import echo, echo_us
from benchmarks.peers.measuring import ARRAYS, IN_FLIGHT, in_flight_name, median, rounds_of

ROOT = Path(__file__).resolve().parent.parent
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
LIMIT_S = 180


@dataclasses.dataclass(frozen=True)
class Other:
    """A contender that `peers` measures in its own process."""

    name: str
    # The module to import for the library.
    module: str
    # A regular expression for the lanes that the library must use.
    lanes: str
    launcher: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """The Python that has the library. Gloo is part of torch, so it is in this Python."""
        return sys.executable if self.module == "torch" else os.environ.get("BENCH_PEERS_PYTHON", "")

    @functools.cache  # noqa: B019  (there are nine, for the life of the program)
    def is_installed(self) -> bool:
        if not self.python or (self.launcher and shutil.which(self.launcher[0]) is None):
            return False
        asked = subprocess.run([self.python, "-c", f"import {self.module}"], capture_output=True, check=False)
        return asked.returncode == 0

    def measure(self) -> harness.Figures:
        run = subprocess.run(
            [*self.launcher, self.python, "-m", "benchmarks.peers", self.name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        if run.returncode != 0:
            raise harness.ContenderFailed(f"{self.name}: {run.stderr[-2000:]}")
        # Libraries may write to stdout too.
        figures: harness.Figures = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
        lanes = str(figures.pop("lanes"))
        if not re.search(self.lanes, lanes):
            raise harness.ContenderFailed(f"{self.name} went by {lanes}")
        jobs.LANES[self.name] = lanes
        return figures


OTHERS = (
    Other("UCXX", "ucxx", "sysv|posix"),
    Other("UCXX plain", "ucxx", "tcp"),
    Other("mpi4py", "mpi4py", "MPI", MPIRUN),
    Other("mpi4py pickled", "mpi4py", "MPI", MPIRUN),
    Other("Gloo", "torch", "tcp"),
    Other("gRPC unix", "grpc", "unix"),
    Other("gRPC tcp", "grpc", "tcp"),
    Other("Ray", "ray", "object store"),
    # `monarch` itself imports half of its dependencies lazily.
    Other("Monarch", "monarch.actor", "channels"),
)


def measure() -> harness.Figures:
    """Measure like `peers`, but with tensors."""
    figures = {}
    for name, (array, calls) in ARRAYS.items():
        tensor = torch.from_numpy(array)
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)
        figures[name] = harness.p50(echo_us(tensor, calls))
    small = torch.from_numpy(ARRAYS["1 KB"][0])
    for echoes in IN_FLIGHT:

        def echo_at_once(n: int = echoes) -> None:
            torch.futures.wait_all([rpc.rpc_async("worker1", echo, (small,)) for _ in range(n)])

        echo_at_once()
        figures[in_flight_name(echoes)] = median(harness.durations_us(echo_at_once, rounds_of(echoes))) / echoes
    return figures


BENCHMARK = harness.Benchmark(
    question="How long does the echo of an array take with others?",
    figures=(
        *(Figure(name, "us") for name in ARRAYS),
        *(Figure(in_flight_name(echoes), "us") for echoes in IN_FLIGHT),
    ),
    contenders=lambda: [
        *(jobs.RpcJob(transport, measure) for transport in jobs.ON_ONE_HOST),
        *(jobs.Baseline(other.name, other.measure) for other in OTHERS if other.is_installed()),
    ],
    rounds=3,
    in_short_set=False,
)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    if "BENCH_PEERS_PYTHON" not in os.environ:
        print("BENCH_PEERS_PYTHON names no Python: only RPC and Gloo are measured", file=sys.stderr)
    sys.exit(main(["others", *sys.argv[1:]]))
