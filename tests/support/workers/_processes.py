"""Processes that start fast, ports that stay free, and the stacks of a process that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ._eventually import eventually

# The fork server imports these modules once, and every process that it forks has them. torch_ucx_rpc is not among them:
# it loads UCX, which reads the environment once, and each test sets other variables. None of these modules may ask CUDA
# anything: forked processes could not use CUDA then ("Cannot re-initialize CUDA in forked subprocess").
PRELOADED = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.rpc",
    "torch.distributed.optim",
    "torch.distributed.nn",
)
# torch's own suites: preloading saves 1.7 s a process. The import asks torch.cuda.is_available(), which is harmless in
# a torch without CUDA.
_PRELOADED_WITHOUT_CUDA = ("torch.testing._internal.distributed.rpc_utils",)

# torch keeps SIGUSR2 for itself.
_STACKS_SIGNAL = signal.SIGUSR1


def process_context() -> multiprocessing.context.ForkServerContext:
    """The multiprocessing context of all tests: a process is forked from a server that has imported torch.

    This way a test with two workers takes well under a second. Importing torch twice would take several seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(() if _has_cuda() else _PRELOADED_WITHOUT_CUDA)])
    return context


def _has_cuda() -> bool:
    """Return whether this torch is built for GPUs, without asking a driver."""
    return torch.version.cuda is not None or torch.version.hip is not None


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port that is reserved for a process of the test during the block.

    A socket that is bound and does not listen keeps the kernel from giving the port to other processes. SO_REUSEADDR,
    which the Store sets too, lets rank 0 listen on the port.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("0.0.0.0", 0))
        yield reservation.getsockname()[1]


def kill(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Kill these processes, and no others."""
    processes = list(processes)
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def stop(pid: int) -> None:
    """Stop a process, and return when all its threads have stopped. SIGCONT continues it.

    The signal stops the threads only when one of them gets a core and handles it. Until then other threads may answer
    calls.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()), f"{pid} has stopped")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process during the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _is_stopped(task: Path) -> bool:
    # The name, in parentheses, may contain spaces.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


# The groups kept by `keep_process_group`.
_kept: list[object] = []


def keep_process_group() -> None:
    """Keep this worker's gloo process group from being destroyed before the process ends by `os._exit`.

    In torch 2.13 its destructor holds the GIL while it joins gloo's threads. One of these threads may be waiting for
    the GIL to release a tensor. Then a function hangs after its return, with any RPC agent: DistributedDataParallel
    often drops the group last.
    """
    _kept.append(dist.group.WORLD)


def dump_stacks_on_request(directory: Path) -> None:
    """Let `dump_stacks` get this worker's Python stacks, even while it holds the GIL.

    They are also written to stderr when the process crashes.
    """
    faulthandler.enable()
    # Kept open for the life of the process: faulthandler writes to the bare file descriptor.
    file = os.open(stacks_file(directory, os.getpid()), os.O_CREAT | os.O_WRONLY, 0o600)
    faulthandler.register(_STACKS_SIGNAL, file=file, all_threads=True)


def dump_stacks(pids: Sequence[int], directory: Path) -> dict[int, str]:
    """The Python stacks of workers that called `dump_stacks_on_request(directory)`. With gdb, also their C++ stacks."""
    # Get the Python stacks first: gdb takes long, and a hanging process may go on or end in that time.
    python = {pid: _python_stacks(pid, directory) for pid in pids}
    return {pid: f"--- stacks of process {pid} ---\n{stacks}{native_stacks(pid)}" for pid, stacks in python.items()}


def stacks_file(directory: Path, pid: int) -> Path:
    """The file with the Python stacks of a process that called `dump_stacks_on_request(directory)`."""
    return directory / f"{pid}.stacks"


def _number_on_its_host(pid: int) -> int:
    """Return the pid that a process has in its own pid namespace, which may be a virtual host's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def _python_stacks(pid: int, directory: Path) -> str:
    try:
        file = stacks_file(directory, _number_on_its_host(pid))
        if not file.exists():
            return "(it hangs before its test began)\n"
        os.kill(pid, _STACKS_SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return "(it has ended just now)\n"
    # The signal handler has finished when the file has stopped growing.
    text, deadline = "", time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.1)
        seen, text = text, file.read_text(errors="replace")
        if text and text == seen:
            return text
    return text or "(it did not answer the request for its Python stacks)\n"


def native_stacks(pid: int) -> str:
    """The C++ stacks of any process, if gdb is installed and may look at it."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return "(no C++ stacks: gdb is not installed)\n"
    settings = ["set pagination off", "set width 0", "set print frame-arguments none"]
    orders = [word for order in (*settings, "thread apply all backtrace 30") for word in ("-ex", order)]
    command = [gdb, "-p", str(pid), "-batch", "-nx", *orders]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "(no C++ stacks: gdb did not finish)\n"
    _, found, threads = done.stdout.partition("\nThread ")
    return f"Thread {threads}" if found else f"(no C++ stacks: {done.stderr.strip()[-500:]})\n"
