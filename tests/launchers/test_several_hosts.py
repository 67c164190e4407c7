"""torchrun and our launcher on several hosts. An argument names the meeting place."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest

from _torch_ucx_rpc_cli import ExitCode
from tests.support.labs import VirtualHosts
from tests.support.workers import Stalls

from ._reports import ENVIRON, FAIL_ONCE, MEET, PYTHON, assert_all_called

TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]


def run_on_two(hosts: VirtualHosts, command: Callable[[int], list[str]]) -> list[tuple[int, str]]:
    """Run launchers on the first two hosts; return their exit codes and output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launchers = [hosts[number].popen(command(number), env=ENVIRON, **pipes) for number in range(2)]
    outputs = []
    try:
        for launcher in launchers:
            outputs.append(launcher.communicate(timeout=100)[0])
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    return [(launcher.returncode, output) for launcher, output in zip(launchers, outputs, strict=True)]


def torch_ucx_rpc_run(number: int, *program: str) -> list[str]:
    meeting = ["--nnodes", "2", "--node-rank", str(number), "--rdzv", "n1:29500"]
    return [PYTHON, "-m", "torch_ucx_rpc", "run", "-n", "2", *meeting, *program]


def test_workers_of_torchrun_meet_across_two_hosts(hosts: VirtualHosts) -> None:
    meeting = ["--rdzv-backend", "static", "--rdzv-endpoint", "n1:29400"]

    def command(number: int) -> list[str]:
        return [
            *TORCHRUN,
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            *meeting,
            "--node-rank",
            str(number),
            "--role",
            "trainer",
            MEET,
        ]

    ends = run_on_two(hosts, command)
    assert [code for code, _ in ends] == [0, 0], ends
    names = ["trainer0", "trainer1", "trainer2", "trainer3"]
    assert_all_called("".join(output for _, output in ends), names, on=["n1", "n1", "n2", "n2"])


@pytest.mark.field
def test_torchrun_restarts_a_job_whose_worker_failed() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", FAIL_ONCE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.run(command, env=ENVIRON, timeout=100, check=False, **pipes)
    assert job.returncode == 0, job.stdout
    assert "the cause" in job.stdout
    for rank in range(2):
        assert f"{rank} is through, in attempt 1" in job.stdout


def test_our_launcher_spreads_roles_over_two_hosts(hosts: VirtualHosts) -> None:
    roles = ["--role", "ps=1", "--role", "trainer=3"]
    ends = run_on_two(hosts, lambda number: torch_ucx_rpc_run(number, *roles, MEET))
    assert [code for code, _ in ends] == [0, 0], ends
    names = ["ps0", "trainer0", "trainer1", "trainer2"]
    assert_all_called("".join(output for _, output in ends), names, on=["n1", "n1", "n2", "n2"])


@pytest.mark.field
def test_failure_on_one_host_ends_the_job_and_both_show_it(hosts: VirtualHosts) -> None:
    program = ["-c", "import os, sys, time; time.sleep(600 if os.environ['RANK'] != '3' else 0); sys.exit('the cause')"]
    begin = time.monotonic()
    with Stalls() as stalls:
        ends = run_on_two(hosts, lambda number: torch_ucx_rpc_run(number, *program))
    assert time.monotonic() - begin < 50 + stalls.seconds()
    for code, output in ends:
        assert code == 1
        assert "since worker3 (pid" in output
        assert output.splitlines()[-1] == "the cause"


@pytest.mark.field
def test_a_failure_on_one_host_restarts_the_job_on_both(hosts: VirtualHosts) -> None:
    program = [
        "-c",
        "import os, sys, time; attempt = os.environ['TORCHELASTIC_RESTART_COUNT']; "
        "time.sleep(60 if attempt == '0' and os.environ['RANK'] != '3' else 0); "
        "print('rank', os.environ['RANK'], 'attempt', attempt); sys.exit('the cause' if attempt == '0' else 0)",
    ]
    ends = run_on_two(hosts, lambda number: torch_ucx_rpc_run(number, "--max-restarts", "1", *program))
    for number, (code, output) in enumerate(ends):
        assert code == 0, ends
        assert "restart 1 of 1 of all workers, since worker3 (pid" in output
        for rank in (2 * number, 2 * number + 1):
            assert f"rank {rank} attempt 1" in output


@pytest.mark.field
def test_a_job_on_two_hosts_forms_again_after_a_restart(hosts: VirtualHosts) -> None:
    def command(number: int) -> list[str]:
        meeting = ["--nnodes", "2", "--node-rank", str(number), "--rdzv", "n1:29500"]
        return [PYTHON, "-m", "torch_ucx_rpc", "run", "-n", "1", *meeting, "--max-restarts", "1", FAIL_ONCE]

    ends = run_on_two(hosts, command)
    for rank, (code, output) in enumerate(ends):
        assert code == 0, ends
        assert f"{rank} is through, in attempt 1" in output


@pytest.mark.field
def test_roles_that_do_not_fit_all_hosts_are_refused_on_both(hosts: VirtualHosts) -> None:
    ends = run_on_two(hosts, lambda number: torch_ucx_rpc_run(number, "--role", "ps=3", "-c", "pass"))
    for code, output in ends:
        assert code == ExitCode.NOT_STARTED
        assert "the roles are for 3 workers, and all machines together start 4" in output
