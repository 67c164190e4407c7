"""A program and all processes that it starts are one session. List its processes, write their stacks, end it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The seconds that a program has to write its results when its time is up, and the seconds for writing stacks.
LAST_WORDS_S = 10.0
STACKS_S = 20.0


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            state, _, _, of = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return sorted(found)


def write_stacks(session: int, log: int, at_most_s: float, path: str | None = None) -> None:
    """Write the C++ stacks of a session's processes into an open file, if there is a debugger on the path."""
    debugger = shutil.which("gdb", path=path) or shutil.which("cuda-gdb", path=path)
    until = time.monotonic() + at_most_s
    for pid in processes_of(session):
        left = until - time.monotonic()
        if debugger is None or left <= 0:
            return
        os.write(log, f"\n--- stacks of process {pid} ---\n".encode())
        order = ["-ex", "set pagination off", "-ex", "thread apply all backtrace 20"]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(
                [debugger, "-p", str(pid), "-batch", "-nx", *order],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=left,
                check=False,
            )


def end(process: subprocess.Popen[Any], at_most_s: float = LAST_WORDS_S) -> None:
    """Send Ctrl-C, so that pytest writes its results. Then send SIGABRT, so that Python writes its stacks. Then kill
    what is left.

    A hanging process stays until SIGABRT. Then it ends at once, unless the machine is busy.
    """
    if process.poll() is None:  # otherwise only leftovers of it are ended
        results_s = LAST_WORDS_S * 0.6
        _send(process.pid, signal.SIGINT)  # pytest-xdist passes the signal on to its workers
        _wait_until(lambda: process.poll() is not None, results_s)
        # The processes write one after the other, while the rest is stopped: they share the log, and would garble it.
        for pid in processes_of(process.pid):
            _send(pid, signal.SIGSTOP)
        until = time.monotonic() + min(STACKS_S, max(LAST_WORDS_S * 0.2, at_most_s - results_s))
        for pid in processes_of(process.pid):
            _send(pid, signal.SIGABRT)
            _send(pid, signal.SIGCONT)
            _wait_until(functools.partial(_has_ended, pid, process.pid), until - time.monotonic())
    kill(process)


def kill(process: subprocess.Popen[Any]) -> None:
    """End the program at once, with all processes that it has started."""
    for pid in processes_of(process.pid):
        _send(pid, signal.SIGKILL)
    process.wait()
    # The other processes are not children of this one. A killed process ends when it next runs; one that hangs in a
    # driver does not.
    _wait_until(lambda: not processes_of(process.pid), LAST_WORDS_S * 0.2)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _has_ended(pid: int, session: int) -> bool:
    return pid not in processes_of(session)


def _wait_until(is_so: Callable[[], bool], at_most_s: float) -> None:
    until = time.monotonic() + at_most_s
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
