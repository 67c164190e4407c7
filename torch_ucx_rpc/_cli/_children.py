"""The workers of ``run`` as processes, where elastic has lost hold of them: it could not start all of them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from pathlib import Path

from torch_ucx_rpc._bootstrap.record import process_stat

# A worker that does not heed SIGTERM for so long is killed.
_PATIENCE_S = 10.0

_LIMITS = {
    errno.EMFILE: ("open files", "ulimit -n", resource.RLIMIT_NOFILE),
    errno.EAGAIN: ("processes", "ulimit -u, or pids.max of a container", resource.RLIMIT_NPROC),
}


def cure_for(error: Exception) -> str:
    """What helps against an error with which a process could not be started; empty where that is unknown."""
    limit = _LIMITS.get(getattr(error, "errno", None) or 0)
    if limit is None:
        return ""
    what, how, number = limit
    count = resource.getrlimit(number)[0]
    return f": raise the limit of {what}, which is {'none' if count == resource.RLIM_INFINITY else count} ({how})"


def end_children() -> None:
    """End all children of this process, each with its session: SIGTERM, and SIGKILL for those that do not heed it."""
    number, until = signal.SIGTERM, time.monotonic() + _PATIENCE_S
    children = _children()
    for pid in children:
        _signal(pid, number)
    while children := [pid for pid in children if not _has_ended(pid)]:
        if time.monotonic() > until and number is signal.SIGTERM:
            number = signal.SIGKILL
            for pid in children:
                _signal(pid, number)
        time.sleep(0.01)


def _children() -> list[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # There is none. It matters that this needs no file: with a child, the files of its output are free by now.
        return []
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process_stat(int(entry.name))[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    # One that has only just been forked leads no session yet.
    for send in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        # Python has waited for it.
        return True
