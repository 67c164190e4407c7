"""How long is a launcher's job from its command to its end?

`python -m torch_ucx_rpc run` and torchrun start workers on this machine, each an interpreter of its own that imports
torch, and of this backend also this package. They do as in the life of a job (many_workers.py): init_rpc, the first
call of all pairs, shutdown. Beside them workers that do nothing but import torch: no backend can be faster than those.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

PROGRAM = Path(__file__).with_name("launched_program.py")
LAUNCHERS = {
    "run": ("-m", "torch_ucx_rpc", "run", "--nproc"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
}
# Each takes as long as its workers need to import torch, a second of CPU time and more each.
JOBS = (("run", 2), ("run", 24), ("torchrun", 24))
LIMIT_S = 300
IMPORT = "import of torch"


def figure_of(launcher: str, workers: int) -> str:
    return f"{workers} workers, {launcher}"


def seconds(launcher: str, workers: int, *program: str) -> float:
    command = [sys.executable, *LAUNCHERS[launcher], str(workers), *program]
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
            os.killpg(run.pid, signal.SIGKILL)  # workers too: they would take time from the next contender
            raise harness.ContenderFailed(f"{workers} workers of {launcher} have not ended in {LIMIT_S} s") from error
    took = time.perf_counter() - started
    done = said.count("is done")
    if run.returncode != 0 or done != workers:
        raise harness.ContenderFailed(f"{done} of {workers} workers of {launcher} ended well: {complaints[-2000:]}")
    return took


def measure(*program: str) -> harness.Figures:
    return {figure_of(launcher, workers): seconds(launcher, workers, *program) for launcher, workers in JOBS}


def contender(transport: jobs.Transport) -> jobs.Baseline:
    program = (str(PROGRAM), transport.backend, json.dumps(transport.options))
    return jobs.Baseline(transport.name, functools.partial(measure, *program))


BENCHMARK = harness.Benchmark(
    question="How long is a launcher's job?",
    figures=tuple(
        Figure(
            figure_of(launcher, workers),
            "s",
            (
                Bound(0.6 if workers >= 24 else None, 0.4, reference=jobs.TENSORPIPE_UV.name),
                Bound(None, reference=IMPORT),
            ),
        )
        for launcher, workers in JOBS
    ),
    contenders=lambda: [
        contender(jobs.UCX),
        contender(jobs.TENSORPIPE_UV),
        jobs.Baseline(IMPORT, functools.partial(measure, str(PROGRAM), "none", "{}")),
    ],
    rounds=1,
    in_short_set=False,
)
