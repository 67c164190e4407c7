"""A text that the workers of one mpirun on this host share, where no variable names their job: MPICH's hydra."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch_ucx_rpc._bootstrap.record import process_stat, start_time
from torch_ucx_rpc._launch.environment import Launch
from torch_ucx_rpc.errors import JoinFailed

# hydra sets it only for its children.
_VARIABLE = "PMI_RANK"


def job_on_this_host(launch: Launch) -> str:
    """A text that all workers of this mpirun have, and no worker of another mpirun on this host.

    Raises JoinFailed if mpirun is not visible.
    """
    origin = _starting_process() or _control_socket()
    if origin is None:
        raise JoinFailed(
            f"{launch.launcher} has started this worker in a pid namespace of its own, such as that of a container: it "
            f"cannot see which mpirun it belongs to. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port (mpirun "
            f"-genv), or let the workers share the pid namespace of mpirun."
        )
    return f"{launch.launcher} {origin}"


def _starting_process() -> str | None:
    """Pid and start time of the nearest ancestor without the variable; None if this pid namespace has none."""
    if Path("/proc/self").readlink().name != str(os.getpid()):
        # /proc belongs to another namespace, with other pids.
        return None
    pid = os.getppid()
    try:
        while pid and _VARIABLE.encode() + b"=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(process_stat(pid)[1])
    except OSError:
        # Another user's process, whose environment cannot be read, was not started by mpirun.
        pass
    return f"{pid} {start_time(pid)}" if pid else None


def _control_socket() -> str | None:
    """The socket that hydra has with mpirun, and that all its children inherit; None if it has been closed since.

    This is the second choice: if the socket has been closed, another socket may have its number.
    """
    try:
        facts = os.fstat(int(os.environ["HYDI_CONTROL_FD"]))
    except (KeyError, OSError, ValueError):
        return None
    return f"socket {facts.st_ino}" if stat.S_ISSOCK(facts.st_mode) else None
