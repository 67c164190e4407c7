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

# A worker that does not heed SIGTERM for so long is killed, and so long it is waited for after that.
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
    """End the children of this process that lead a session, as workers do: by SIGTERM, and SIGKILL where that is not
    heeded."""
    children = _children()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in children:
            # One of another user (setuid) is left to itself.
            with contextlib.suppress(OSError):
                os.killpg(pid, number)
        until = time.monotonic() + _PATIENCE_S
        while (children := [pid for pid in children if not _has_ended(pid)]) and time.monotonic() < until:
            time.sleep(0.01)


def _children() -> list[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # There is none. It matters that this needs no file: with a child, the files of its output are free by now.
        return []
    found = []
    with contextlib.suppress(OSError):
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                _, parent, _, session = process_stat(int(entry.name))[:4]
                if (int(parent), session) == (os.getpid(), entry.name):
                    found.append(int(entry.name))
    return found


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        # Python has waited for it.
        return True
