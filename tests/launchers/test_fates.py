"""What the other workers' shutdown does when a worker ends: the table of docs/failure_model.md, row by row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.workers import eventually

PROGRAM = Path(__file__).parent / "programs" / "fate.py"
OTHERS = ("worker0", "worker2")
LAUNCHERS = {
    "run": ("torch_ucx_rpc", "run", "-n", "3"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
}
LOST = "BarrierFailed: the shutdown is over, but not all workers have come to it: lost worker 'worker1'"
LATE = "BarrierFailed: worker 'worker0' waited 4000 ms for all workers to come to the same point; missing: worker"
# The beginning of the outcome of worker0's shutdown, and the exit codes of `run` and of torchrun.
FATES = {
    "killed": (LOST, {"run": 128 + signal.SIGKILL, "torchrun": 1}),
    "stopped": (LATE, {"run": 128 + signal.SIGKILL, "torchrun": 1}),
    "never calls shutdown": (LATE, {"run": 128 + signal.SIGKILL, "torchrun": 1}),
    "exception": ("returned", {"run": 1, "torchrun": 1}),
    "sys.exit(3)": ("returned", {"run": 3, "torchrun": 1}),
    "sys.exit()": ("returned", {"run": 0, "torchrun": 0}),
    "Ctrl-C": ("KeyboardInterrupt", {"run": 128 + signal.SIGINT, "torchrun": 1}),
}


@pytest.mark.parametrize("launcher", ["run", pytest.param("torchrun", marks=pytest.mark.field)])
@pytest.mark.parametrize("fate", FATES)
def test_shutdown_of_the_others_ends_as_the_page_says(fate: str, launcher: str, tmp_path: Path) -> None:
    expected, exit_codes = FATES[fate]
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(PROGRAM), fate, str(tmp_path)]
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # A shell's background programs ignore Ctrl-C, and their children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            if fate == "killed":
                # Stop the launcher: it would end the other workers before they note the outcome.
                eventually(lambda: all((tmp_path / f"{name}.pid").exists() for name in OTHERS), "the others run")
                os.kill(job.pid, signal.SIGSTOP)
                (tmp_path / "launcher is stopped").touch()
            eventually(
                lambda: all((tmp_path / f"{name}.shutdown").exists() for name in OTHERS),
                "the others have ended their shutdown",
                timeout=60,
            )
            if fate == "killed":
                os.kill(job.pid, signal.SIGCONT)
            if expected == LATE:
                # The launcher waits for this worker as long as it lives.
                assert job.poll() is None
                os.kill(int((tmp_path / "worker1.pid").read_text()), signal.SIGKILL)
            exit_code = job.wait(60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    said = {name: (tmp_path / f"{name}.shutdown").read_text() for name in OTHERS}
    assert said["worker0"].startswith(expected), said
    # Only the worker of the lowest rank knows which worker is missing.
    assert said["worker2"].startswith(expected if expected != LATE else "BarrierFailed: worker 'worker2' waited"), said
    assert exit_code == exit_codes[launcher], (tmp_path / "output").read_text()
