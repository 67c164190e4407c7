"""The section of ``info`` about the machine: cores, memory, limits, and the container around it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from torch_ucx_rpc._bootstrap import network
from torch_ucx_rpc._bootstrap.site_settings import KEEP_NOFILE, keeps_limit_of_files
from torch_ucx_rpc._cli._report import Report

_MIB = 1 << 20

# Below these limits, a job may fail that runs on other machines. A Docker container has 64 MiB of shared memory.
_LEAST_SHARED_MEMORY = 256 * _MIB
_LEAST_FILES = 4096

# A reachable resolver answers within milliseconds.
_SLOW_RESOLVER_S = 1.0


def add_machine(report: Report) -> None:
    """Add the facts and the problems of this machine."""
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    keeps_files = keeps_limit_of_files()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.add(
        "machine",
        host=socket.gethostname(),
        system=platform.platform(),
        cores_for_this_process=len(os.sched_getaffinity(0)),
        container=_container(),
        shared_memory="no /dev/shm" if shared is None else f"{_mib(shared.free)} free of {_mib(shared.total)}",
        open_files=f"{files} (can be raised to {most_files}"
        + (f", but {KEEP_NOFILE}=1)" if keeps_files else ", as init_rpc does)"),
        locked_memory="unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024} KiB",
        reading_other_processes=_reading_other_processes(),
        interfaces=[name for _, name in socket.if_nameindex()],
    )
    if shared is None or shared.free < _LEAST_SHARED_MEMORY:
        report.complain(
            f"shared memory is small: {_mib(0 if shared is None else shared.free)} free in /dev/shm, in which workers "
            f"of one host talk to each other",
            "in a container: --shm-size=1g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
            "otherwise remove what is left over in /dev/shm",
        )
    usable = files if keeps_files else most_files
    if 0 <= usable < _LEAST_FILES:
        report.complain(
            f"a process may open {usable} files, and each worker needs some for each peer it talks to over TCP",
            f"unset {KEEP_NOFILE}"
            if usable != most_files
            else "raise the hard limit: ulimit -Hn 65536 as root, or docker run --ulimit nofile=65536",
        )
    _add_resolver(report)


def _add_resolver(report: Report) -> None:
    """Ask for the name of this host's address, as torch's Store does for each client."""
    address = network.address_towards(network.ELSEWHERE) or "127.0.0.1"
    client = (address if ":" in address else f"::ffff:{address}", 0, 0, 0)
    began = time.monotonic()
    question = threading.Thread(target=_ask_for_name, args=(client,), daemon=True)
    question.start()
    question.join(_SLOW_RESOLVER_S)
    took = time.monotonic() - began
    report.add("machine", resolver=f"no answer in {took:.1f} s" if question.is_alive() else f"{took * 1000:.0f} ms")
    if question.is_alive():
        report.complain(
            f"the resolver has not found the name of {address} in {took:.1f} s; torchrun and TensorPipe's workers "
            f"ask it for their own names",
            "fix the DNS of this host (/etc/resolv.conf)",
        )


def _ask_for_name(client: tuple[str, int, int, int]) -> None:
    with contextlib.suppress(OSError):
        socket.getnameinfo(client, socket.NI_NUMERICSERV)


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return os.environ.get("container")  # noqa: SIM112 - systemd's, which is lower case


def _reading_other_processes() -> str:
    """Whether UCX could use its transport cma here. The agent works without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = (ctypes.c_size_t * 2)(0, 1)
    # A small container may have no program besides Python, not even sleep.
    with subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(60)"]) as other:
        # Address 0 is not mapped, but the kernel checks the permission first.
        libc.process_vm_readv(other.pid, nothing, 1, nothing, 1, 0)
        answer = "allowed" if ctypes.get_errno() == errno.EFAULT else f"refused, {os.strerror(ctypes.get_errno())}"
        other.kill()
    scope = _read(Path("/proc/sys/kernel/yama/ptrace_scope")) or "none"
    return f"{answer} (ptrace_scope: {scope}); cma is not used, so either will do"


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
