"""Containers like Docker's and Kubernetes's, of namespaces on this machine: `Container`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

# Docker's capabilities, which Kubernetes uses too.
DEFAULT_CAPABILITIES = (
    *("audit_write", "chown", "dac_override", "fowner", "fsetid", "kill", "mknod", "net_bind_service", "net_raw"),
    *("setfcap", "setgid", "setpcap", "setuid", "sys_chroot"),
)

# The programs need these folders of this machine.
_NEEDED = (Path(__file__).resolve().parents[3], Path(sys.prefix))

_TMP = Path("/tmp")
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Container:
    """A container for a command, with options like those of ``docker run``, and with this machine's files.

    It has its own mounts. Its first process is the command, or, with ``init``, one that starts the command.

    Args:
        ipc: "private", with a ``/dev/shm`` of ``shm_mib``; or "host", with System V IPC and ``/dev/shm`` of the host.
        pid: "private", with processes of its own; or "host", with those of the host.
        network: "host", the network of its host (a pod's, if the host is one of `VirtualHosts`); or "none", with the
            loopback interface alone.
        hostname: the container's name, which does not resolve; empty for the host's name.
        read_only: only ``/tmp`` and ``/dev/shm`` can be written.
        user: number of the user, with or without a name. Only root, 0, has capabilities.
        capabilities: the capabilities that root has; it can gain no others.
        first_pid: with ``init`` and processes of its own, the number of the command's process.
        cgroups: folders of `limits`, to run within.
    """

    ipc: str = "private"
    pid: str = "private"
    network: str = "host"
    hostname: str = ""
    shm_mib: int = 64
    read_only: bool = False
    user: int = 0
    capabilities: Collection[str] = DEFAULT_CAPABILITIES
    init: bool = False
    first_pid: int = 2
    cgroups: Sequence[Path] = ()

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that runs ``program`` in such a container, and ends with its exit code. SIGKILL ends the
        whole container."""
        assert {self.ipc, self.pid} <= {"private", "host"}
        assert self.network in ("host", "none")
        set_up = []
        if self.network == "none":
            set_up.append("ip link set lo up")
        if self.hostname:
            set_up.append(f"hostname {self.hostname}")
        if self.pid == "private":
            set_up.append("mount -t proc -o nosuid,noexec,nodev proc /proc")
        if self.ipc == "private":
            set_up.append(f"mount -t tmpfs -o mode=1777,size={self.shm_mib}m shm /dev/shm")
        if self.user != 0:
            # All users can read an image's files. Here Python may be in root's home, which others cannot read.
            set_up += [
                "mount -t tmpfs -o mode=755 home /mnt",
                "mkdir -m 755 /mnt/upper /mnt/work",
                f"mount -t overlay -o lowerdir={Path.home()},upperdir=/mnt/upper,workdir=/mnt/work home {Path.home()}",
            ]
            if self.read_only:
                set_up.append(f"mount -o remount,ro {Path.home()}")
        if self.user != 0 or self.read_only:
            set_up += _new_tmp()
        if self.read_only:
            set_up.append("mount -o remount,bind,ro /")
        if self.init and self.pid == "private":
            set_up.append(f"echo {self.first_pid - 1} > /proc/sys/kernel/ns_last_pid")
        capabilities = ",".join(["-all", *(f"+{name}" for name in sorted(self.capabilities))])
        # The kernel forgets the parent-death signal when the user changes, so one command sets both.
        dropping = f"setpriv --pdeathsig KILL --reuid={self.user} --regid={self.user} --clear-groups"
        # A user without a name has no home either.
        run = f'env HOME={"/root" if self.user == 0 else "/"} {dropping} --bounding-set={capabilities} -- "$@"'
        set_up.append(f"{run} & wait $!" if self.init else f"exec {run}")
        join = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in self.cgroups)
        spaces = ["--mount", "--uts", "--cgroup"]
        spaces += ["--ipc"] if self.ipc == "private" else []
        spaces += ["--pid"] if self.pid == "private" else []
        spaces += ["--net"] if self.network == "none" else []
        # The shell starts the first process. `unshare --fork` would return 1 after SIGKILL
        # (https://github.com/util-linux/util-linux/issues/2614, before 2.40).
        first = 'setpriv --pdeathsig KILL sh -euc "$0" - "$@"; exit $?'
        start = ["sh", "-euc", f'{join}exec "$@"', "-", "unshare", *spaces, "sh", "-uc", first]
        return [*start, "; ".join(set_up), *program]


def _new_tmp() -> list[str]:
    """Return commands that mount a new ``/tmp`` with only the needed folders of the old one.

    All users can enter the new parents of these folders. Folders of ``mktemp -d`` would be private.
    """
    kept = [folder for folder in _NEEDED if _TMP in folder.parents]
    kept = [folder for folder in kept if not set(kept) & set(folder.parents)]
    # Open files still reach the folders once the new /tmp covers them. A mount from such a file must not look up its
    # path.
    files = list(enumerate(kept, 5))
    commands = [f"exec {file}< {folder}" for file, folder in files]
    commands.append("mount -t tmpfs -o mode=1777 tmp /tmp")
    for file, folder in files:
        commands += [
            f"mkdir -p {folder}",
            f"mount --no-canonicalize --bind /proc/self/fd/{file} {folder}",
            f"mount -o remount,bind,ro {folder}",
            f"exec {file}<&-",
        ]
    # The new /tmp may cover the current folder too.
    return [*commands, 'cd "$PWD"'] if kept else commands


@contextlib.contextmanager
def limits(*, memory_mib: int | None = None, cpus: float | None = None) -> Iterator[list[Path]]:
    """Make control groups with these limits, for `Container`. Skip the test if none can be made.

    Args:
        memory_mib: if the container uses more, the kernel kills one of its processes.
        cpus: processor seconds that all processes together get in a second.
    """
    wanted = {"memory": memory_mib, "cpu": cpus}
    controllers = [name for name, value in wanted.items() if value is not None]
    with contextlib.ExitStack() as made:
        folders = []
        try:
            is_unified = (_CGROUPS / "cgroup.controllers").exists()
            if is_unified:
                (_CGROUPS / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
            for parent in [_CGROUPS] if is_unified else [_CGROUPS / name for name in controllers]:
                folder = parent / f"test-{uuid.uuid4().hex}"
                folder.mkdir()
                made.callback(_remove, folder)
                folders.append(folder)
            if memory_mib is not None:
                file = folders[0] / ("memory.max" if is_unified else "memory.limit_in_bytes")
                file.write_text(str(memory_mib << 20))
                # Otherwise excess memory would be swapped out.
                swap = folders[0] / ("memory.swap.max" if is_unified else "memory.swappiness")
                if swap.exists():
                    swap.write_text("0")
            if cpus is not None:
                quota = round(cpus * _PERIOD_US)
                if is_unified:
                    (folders[0] / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
                else:
                    (folders[-1] / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            pytest.skip(f"no control groups can be made: {error}")
        yield folders


def _remove(folder: Path) -> None:
    """Remove a control group. The kernel counts ended processes for a moment longer."""
    deadline = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
