"""How ``python -m torch_ucx_rpc run`` ends: by signals, and on several machines. One machine stands for all of them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from _torch_ucx_rpc_cli import ExitCode
from tests.support.workers import reserved_port

COMMAND = [sys.executable, "-m", "torch_ucx_rpc", "run"]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
WAIT = "import os, time; print(os.getpid()); time.sleep(600)"


@contextlib.contextmanager
def launchers(
    *commands: list[str], ignored: signal.Signals | None = None, **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    def set_signals() -> None:
        # A shell's background programs ignore Ctrl-C, and their children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if ignored is not None:
            signal.signal(ignored, signal.SIG_IGN)

    started = [
        subprocess.Popen(
            [*COMMAND, *command],
            env=ENVIRON | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=set_signals,
        )
        for command in commands
    ]
    try:
        yield started
    finally:
        for launcher in started:
            launcher.kill()
            launcher.communicate()


@contextlib.contextmanager
def two_machines(*arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    with reserved_port() as port:
        meeting = ["-n", "1", "--nnodes", "2", "--rdzv", f"127.0.0.1:{port}"]
        commands = [[*meeting, "--node-rank", rank, *arguments] for rank in ("0", "1")]
        with launchers(*commands) as started:
            yield started


def wait_for(file: Path) -> str:
    """Return a program that prints its pid and waits for a file."""
    return (
        "import os, pathlib, sys, time; print(os.getpid(), flush=True); "
        f"[time.sleep(0.001) for _ in iter(pathlib.Path({str(file)!r}).exists, True)]"
    )


def processes_with(word: str) -> list[int]:
    """Return the pids of the processes that have this word in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


# ---- Signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_ends_the_job_on_all_machines_which_say_where(interrupted: int) -> None:
    with two_machines("--max-restarts", "3", "-c", WAIT) as machines:
        for machine in machines:
            machine.stdout.readline()
        machines[interrupted].send_signal(signal.SIGINT)
        for machine in machines:
            _, errors = machine.communicate(timeout=60)
            assert re.search(
                rf"^torch_ucx_rpc run: SIGINT on \S+ \(--node-rank {interrupted}\), all workers have been ended$",
                errors,
                re.MULTILINE,
            ), errors
            assert "restart" not in errors
            assert machine.returncode == 128 + signal.SIGINT


def test_launcher_under_nohup_outlives_a_hangup(tmp_path: Path) -> None:
    with launchers(["-n", "1", "-c", wait_for(tmp_path / "go")], ignored=signal.SIGHUP) as [launcher]:
        pid = int(launcher.stdout.readline().split()[1])
        for hung_up in (pid, launcher.pid):
            os.kill(hung_up, signal.SIGHUP)
        (tmp_path / "go").touch()
        _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (0, "")


def test_signal_during_the_start_leaves_no_worker_behind() -> None:
    mark = uuid.uuid4().hex
    # The first worker ends the launcher while it is still starting the last workers.
    code = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0': os.kill(os.getppid(), signal.SIGTERM)\n"
        f"time.sleep(600)  # {mark}"
    )
    with launchers(["-n", "60", "-c", code]) as [launcher]:
        launcher.communicate(timeout=150)
    left = processes_with(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


# ---- Failures --------------------------------------------------------------------------------------------------------


# With this limit of files the launcher starts some of 30 workers, and fails at a later one.
FILES_FOR_SOME_OF_30 = 90
# With this limit it fails before the first worker.
FILES_FOR_NONE = 60


def limit_files(process: subprocess.Popen[str], count: int) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (count, count))


@pytest.mark.parametrize("files", [FILES_FOR_SOME_OF_30, FILES_FOR_NONE])
def test_failed_start_ends_the_started_workers_and_says_why(files: int) -> None:
    mark = uuid.uuid4().hex
    with launchers(["-n", "30", "--max-restarts", "3", "-c", WAIT, mark]) as [launcher]:
        limit_files(launcher, files)
        _, errors = launcher.communicate(timeout=60)
        assert re.fullmatch(
            r"torch_ucx_rpc run: the others were ended, since the 30 workers of \S+ could not all be started: .*"
            rf"Too many open files.*: raise the limit of open files, which is {files} \(ulimit -n\)\n",
            errors,
        ), errors
        assert launcher.returncode == ExitCode.NOT_STARTED
        assert processes_with(mark) == []


def test_machine_that_cannot_start_workers_tells_the_others() -> None:
    mark = uuid.uuid4().hex
    with reserved_port() as port:
        meeting = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "-c", WAIT, mark]
        commands = [["-n", count, "--node-rank", rank, *meeting] for rank, count in (("0", "1"), ("1", "30"))]
        with launchers(*commands) as machines:
            limit_files(machines[1], FILES_FOR_SOME_OF_30)
            for machine in machines:
                _, errors = machine.communicate(timeout=60)
                assert "since the 30 workers of" in errors, errors
                assert machine.returncode == ExitCode.NOT_STARTED
            assert processes_with(mark) == []


def test_two_machines_failing_at_once_report_one_failure(tmp_path: Path) -> None:
    code = wait_for(tmp_path / "go") + "; sys.exit(3 + int(os.environ['RANK']))"
    with two_machines("-c", code) as machines:
        for machine in machines:
            machine.stdout.readline()
        (tmp_path / "go").touch()
        errors = [machine.communicate(timeout=60)[1] for machine in machines]
        codes = {machine.returncode for machine in machines}
    told = {
        re.search(r"since worker(\d) \(pid \d+ on \S+\) ended with exit code (\d)", text).groups() for text in errors
    }
    assert len(told) == 1, errors
    [(rank, code)] = told
    assert codes == {3 + int(rank)} == {int(code)}


def test_worker_hung_in_the_kernel_is_not_restarted() -> None:
    # A process hangs in the kernel until the child of its vfork has ended.
    code = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(60)"
    command = ["-n", "1", "--max-restarts", "3", "-c", code]
    with launchers(command, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1") as [launcher]:
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert re.search(r"since a worker on \S+ has hung in the kernel", errors), errors
    assert "restart" not in errors
