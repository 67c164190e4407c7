"""Ends the started workers of ``run`` if elastic could not start all workers: then elastic has lost track of them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Iterable

from torch_ucx_rpc._cli._starter.client import Worker

# How long to wait for a worker after SIGTERM, and again after SIGKILL.
_PATIENCE_S = 10.0

_LIMITS = {
    errno.EMFILE: ("open files", "ulimit -n", resource.RLIMIT_NOFILE),
    errno.EAGAIN: ("processes", "ulimit -u, or pids.max of a container", resource.RLIMIT_NPROC),
}


def cure_for(error: Exception) -> str:
    """The cure for an error at the start of a process; empty if there is none."""
    limit = _LIMITS.get(getattr(error, "errno", None) or 0)
    if limit is None:
        return ""
    what, how, number = limit
    count = resource.getrlimit(number)[0]
    return f": raise the limit of {what}, which is {'none' if count == resource.RLIM_INFINITY else count} ({how})"


def end(workers: Iterable[Worker]) -> None:
    """End these workers, by SIGTERM, and by SIGKILL if that does not help."""
    running = [worker for worker in workers if worker.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in running:
            # Leave a worker of another user (setuid) alone.
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, number)
        until = time.monotonic() + _PATIENCE_S
        while (running := [worker for worker in running if worker.poll() is None]) and time.monotonic() < until:
            time.sleep(0.01)
