"""How long does a launcher's job take from its command to its end, and how much memory do its workers take?

`torch-ucx-rpc run` forks workers from a process that has imported torch, or starts each by exec. torchrun always uses
exec. The workers do the same as in the life of a job (many_workers.py): init_rpc, the first call of all pairs,
shutdown.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

PROGRAM = Path(__file__).with_name("launched_program.py")
RUN = ("-m", "torch_ucx_rpc", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
FEW, MANY = 2, 24
LIMIT_S = 300

FORK = jobs.UCX.name
EXEC, UCX_TORCHRUN = "UCX, exec", "UCX, torchrun"
# This contender runs under torchrun too.
TENSORPIPE = jobs.TENSORPIPE_UV.name


def job(launcher: tuple[str, ...], workers: int, *program: str) -> tuple[float, str]:
    """Run a job. Return the seconds from the command to its end, and the workers' output."""
    command = [sys.executable, *launcher, str(workers), *program]
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as run:
        try:
            said, complaints = run.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(run.pid, signal.SIGKILL)  # workers too, which would take time from the next contender
            raise harness.ContenderFailed(f"{workers} workers have not ended in {LIMIT_S} s: {command}") from error
    took = time.perf_counter() - started
    done = said.count("is done")
    if run.returncode != 0 or done != workers:
        raise harness.ContenderFailed(f"{done} of {workers} workers ended well: {command}: {complaints[-2000:]}")
    return took, said


def measure(launcher: tuple[str, ...], transport: jobs.Transport) -> harness.Figures:
    program = (str(PROGRAM), transport.backend, json.dumps(transport.options))
    figures = {f"{workers} workers": job(launcher, workers, *program)[0] for workers in (FEW, MANY)}
    _, said = job(launcher, MANY, *program, "memory")
    kib = re.findall(r"with (\d+) KiB", said)
    return {**figures, f"{MANY} workers, memory": sum(map(int, kib)) / 1024}


def contender(name: str, launcher: tuple[str, ...], transport: jobs.Transport) -> jobs.Baseline:
    return jobs.Baseline(name, functools.partial(measure, launcher, transport))


def bounds(must: float) -> tuple[Bound, ...]:
    return tuple(Bound(must, reference=reference) for reference in (UCX_TORCHRUN, EXEC, TENSORPIPE))


BENCHMARK = harness.Benchmark(
    question="How long is a launcher's job?",
    figures=(
        Figure(f"{FEW} workers", "s", bounds(0.6)),
        Figure(f"{MANY} workers", "s", bounds(0.25)),
        # The sum of Pss, in which shared memory counts once, after all calls.
        Figure(f"{MANY} workers, memory", "MiB", bounds(0.25)),
    ),
    contenders=lambda: [
        contender(FORK, (*RUN, "--start", "fork", "--nproc"), jobs.UCX),
        contender(EXEC, (*RUN, "--start", "exec", "--nproc"), jobs.UCX),
        contender(UCX_TORCHRUN, TORCHRUN, jobs.UCX),
        contender(TENSORPIPE, TORCHRUN, jobs.TENSORPIPE_UV),
    ],
    rounds=3,
    in_short_set=False,
)
