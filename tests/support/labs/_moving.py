"""A process of a test on a virtual host: `move_to_host`."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def move_to_host(host_pid: int) -> None:
    """Continue as a process of the host whose first process is ``host_pid``, with all open files.

    The caller must have a single thread. Only a child can be in another pid namespace, so this returns in a child. The
    caller's process waits for the child and exits as it does. If the caller's process is killed, the kernel kills the
    child.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    folder = Path.cwd()
    spaces = [os.open(f"/proc/{host_pid}/ns/{space}", os.O_RDONLY) for space in ("net", "ipc", "uts", "mnt", "pid")]
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot move to the virtual host")
        os.close(space)
    # A process that enters a mount namespace starts at its root.
    os.chdir(folder)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
