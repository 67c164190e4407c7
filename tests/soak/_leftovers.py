"""Leftovers of workers, in their processes and on their hosts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tests.support.labs import VirtualHost, VirtualHosts

from ._crew import Member
from ._journal import KINDS, Step
from ._judgement import Finding

_RREFS = "values of RRefs"
# The numbers of RRefs that a call of the kind "autograd" passes to its optimizer, and of the call's executions.
_RREFS_OF_AN_OPTIMIZER, _EXECUTIONS_WITH_AN_OPTIMIZER = 2, 6

# A file of UCX's transport "posix" (uct_posix_mem_alloc()).
_UNFINISHED, _KILLS_FOR_AN_UNFINISHED = "/dev/shm/ucx_shm_posix_", 100


def left_by_workers(members: Collection[Member], calls: np.ndarray) -> list[Finding]:
    """Find threads, open files, buffers, contexts and values of references that a worker had at its end but not before.

    If an owner passes a reference to a worker that then dies, the value stays (docs/failure_model.md). Here only
    optimizers get such references.
    """
    autograd = calls["kind"] == KINDS.index("autograd")
    begun, answered = (np.count_nonzero(autograd & (calls["step"] == step)) for step in (Step.BEGUN, Step.ANSWERED))
    excused = (begun - answered) // _EXECUTIONS_WITH_AN_OPTIMIZER * _RREFS_OF_AN_OPTIMIZER
    left = {member.name: dict(member.result or {}) for member in members}
    kept = sum(what.pop(_RREFS, 0) for what in left.values())
    lines = [f"{name}: {count} x {what}" for name, all_ in left.items() for what, count in all_.items() if count]
    if kept > excused:
        lines.append(f"all workers: {kept} x {_RREFS}, and the dead can have held {excused}")
    return [Finding("left by a worker", len(lines), tuple(lines))] if lines else []


def left_on_hosts(hosts: VirtualHosts, kills: int) -> list[Finding]:
    """Find processes, files in ``/dev/shm`` and System V segments that are left.

    At a worker's start UCX creates a file in ``/dev/shm`` and then unlinks it. A kill in between leaves that file. One
    in a hundred killed workers may leave one.
    """
    lines = [
        f"{host.name}: {line}" for host in hosts for look in (_processes, _files, _segments) for line in look(host)
    ]
    unfinished = [line for line in lines if _UNFINISHED in line]
    if len(unfinished) <= kills // _KILLS_FOR_AN_UNFINISHED:
        lines = [line for line in lines if line not in unfinished]
    return [Finding("left on a host", len(lines), tuple(lines))] if lines else []


def _processes(host: VirtualHost) -> list[str]:
    # Leave out the host's first process, and the processes of this check.
    names = _lines(host, "cat /proc/[0-9]*/comm")
    return [f"process {name}" for name in names if name not in ("sleep", "sh", "cat")]


def _files(host: VirtualHost) -> list[str]:
    return [f"/dev/shm/{name}" for name in _lines(host, "ls /dev/shm")]


def _segments(host: VirtualHost) -> list[str]:
    rows = [row.split() for row in _lines(host, "cat /proc/sysvipc/shm")[1:]]
    return [f"System V segment {row[1]} of {row[3]} bytes" for row in rows]


def _lines(host: VirtualHost, command: str) -> list[str]:
    # A process may end during this check.
    return host.run(["sh", "-c", command], capture_output=True, text=True, check=False).stdout.splitlines()
