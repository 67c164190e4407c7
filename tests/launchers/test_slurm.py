"""On Slurm with 4 nodes the workers find each other without variables or arguments."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.labs import SlurmCluster
from tests.support.workers import eventually

from ._reports import FAIL, MEET, PYTHON, PYTHON_PATH, assert_all_called


def srun(slurm: SlurmCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return slurm.run(["srun", *arguments], env=PYTHON_PATH, timeout=120)


def test_workers_meet_on_nodes_with_gaps_in_their_numbers(slurm: SlurmCluster) -> None:
    done = srun(slurm, "-w", "n[1,3-4]", "-n", "3", PYTHON, MEET)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, ["worker0", "worker1", "worker2"], on=["n1", "n3", "n4"])


@pytest.mark.field
def test_two_steps_at_once_on_the_same_nodes_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    # The nodes have different numbers of tasks, and the script itself is not a task.
    script.write_text(
        f"""#!/bin/bash
srun --overlap -n 3 --output={tmp_path}/first.txt {PYTHON} {MEET} &
srun --overlap -n 2 --output={tmp_path}/second.txt {PYTHON} {MEET} &
wait
{PYTHON} -c 'import torch_ucx_rpc; torch_ucx_rpc.init_rpc()'
touch {tmp_path}/over
"""
    )
    log = tmp_path / "log.txt"
    slurm.run(["sbatch", "-w", "n[2,4]", f"--output={log}", str(script)], env=PYTHON_PATH, check=True)
    # sbatch --wait would ask only every ten seconds.
    eventually((tmp_path / "over").exists, "the end of the batch script", timeout=100)
    said = log.read_text()
    assert_all_called((tmp_path / "first.txt").read_text(), ["worker0", "worker1", "worker2"], on=["n2", "n2", "n4"])
    assert_all_called((tmp_path / "second.txt").read_text(), ["worker0", "worker1"], on=["n2", "n4"])
    assert re.search(r"within job \d+ of Slurm but no task of it: start it with srun", said)


@pytest.mark.field
def test_heterogeneous_step_may_have_rank_0_on_a_later_node(slurm: SlurmCluster) -> None:
    done = srun(slurm, "-w", "n4", "-n", "1", PYTHON, MEET, ":", "-w", "n[1-2]", "-n", "2", PYTHON, MEET)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, ["worker0", "worker1", "worker2"], on=["n4", "n1", "n2"])


def test_with_k_a_killed_task_ends_the_others(slurm: SlurmCluster) -> None:
    done = srun(slurm, "-K1", "-N", "3", "-n", "3", PYTHON, FAIL, "kill")
    # srun ends the other tasks by SIGTERM, and returns the largest exit code.
    assert done.returncode == 128 + signal.SIGTERM
    assert "task 1: Killed" in done.stderr


@pytest.mark.field
def test_without_k_callers_of_a_killed_task_name_it_and_end(slurm: SlurmCluster) -> None:
    done = srun(slurm, "--kill-on-bad-exit=0", "-N", "3", "-n", "3", PYTHON, FAIL, "kill")
    assert done.returncode != 0
    lost = re.findall(r"^torch_ucx_rpc\.errors\.WorkerLost: .*worker1.*rank 1", done.stderr, re.MULTILINE)
    assert len(lost) == 2, done.stderr
