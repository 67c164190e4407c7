"""The process that starts the workers of ``run`` on this machine. The package's docstring has the protocol.

Python imports this as ``sitecustomize`` in the starter alone. At its top, it imports only modules of the standard
library: torch may be missing or broken.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

# The starter's settings, as JSON: see `Starter`.
VARIABLE = "_TORCH_UCX_RPC_STARTER"

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# The pause of a new worker between two checks whether the launcher is its parent.
_INTERVAL_S = 0.002
# Longer than most requests. `_receive` puts the parts of a longer one together.
_REQUEST_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of Linux."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
                *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: bytes, environ: bytes) -> bool:
    """Make /proc/self/cmdline and /proc/self/environ show these. False where the kernel does not let a process do
    so."""
    # The name of the process, which comes second, may have spaces.
    numbers = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()

    def field(number: int) -> int:
        return int(numbers[number - 3])

    _libc.malloc.restype = _libc.sbrk.restype = ctypes.c_void_p
    # Never freed: the kernel reads it as long as the process lives.
    begin = _libc.malloc(ctypes.c_size_t(len(command) + len(environ)))
    ctypes.memmove(begin, command + environ, len(command) + len(environ))
    middle, end = begin + len(command), begin + len(command) + len(environ)
    # The numbers of fields are those of proc_pid_stat(5).
    places = (field(26), field(27), field(45), field(46), field(47), _libc.sbrk(0), field(28), begin, middle)
    layout = _MemoryMap(*places, middle, end, 0, 0, 0xFFFF_FFFF)
    size = ctypes.sizeof(layout)
    return bool(_libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(size), 0) == 0)


def _environ_bytes(environ: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())


# ---- Before the first worker -----------------------------------------------------------------------------------------


def _preload(modules: Iterable[str], program: str) -> str | None:
    """Import the modules for the workers; return why no worker can be forked here."""
    files = _files()
    before = set(sys.modules)
    gc.disable()
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    # The present objects live as long as their process. No collection looks at them, so workers share their memory.
    gc.freeze()
    gc.enable()
    if left := [name for number, name in _files().items() if number not in files]:
        return f"importing {', '.join(modules)} has left {left[0]} open"
    if shadows := _shadows(before, program):
        return f"{shadows} would be imported in the place of another module"
    if not show(b"torch-ucx-rpc\0starter\0", b""):
        return "this kernel does not let a process set its command line (CONFIG_CHECKPOINT_RESTORE)"
    return None


def _files() -> dict[str, str]:
    """The open files of this process, by number."""
    files = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The listing has closed its own descriptor.
        with contextlib.suppress(FileNotFoundError):
            files[entry.name] = str(entry.readlink())
    return files


def _shadows(before: Collection[str], program: str) -> str | None:
    """Find a file beside the program that would have been imported instead of an already imported module."""
    if getattr(sys.flags, "safe_path", False):
        return None
    script = Path(program).resolve()
    folder = str(Path.cwd() if program in ("-m", "-c") else script if script.is_dir() else script.parent)
    for name in sorted({module.partition(".")[0] for module in set(sys.modules) - set(before)} - set(before)):
        found = importlib.machinery.PathFinder.find_spec(name, [folder])
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if found is not None and found.origin and loaded and not Path(found.origin).samefile(loaded):
            return found.origin
    sys.path_importer_cache.pop(folder, None)
    return None


# ---- Workers ---------------------------------------------------------------------------------------------------------


def _serve(link: socket.socket, launcher: int, reason: str | None) -> dict[str, str]:
    """Start workers until the launcher has ended. Returns in each worker, with its environment."""
    is_told = False
    while True:
        with warnings.catch_warnings():
            # Python warns of a fork in a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            helper = os.fork()
        if helper == 0:
            return _start_workers(link, launcher)
        if not is_told:
            _send(link, {"reason": reason or _threads()})
            is_told = True
        if os.waitpid(helper, 0)[1] != 0:
            os._exit(1)
        _send(link, {"ended": True})


def _threads() -> str | None:
    """Return why no worker can be forked here after all. Call it after a fork: OpenBLAS, for one, ends its threads
    before that."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    return None if threads == 1 else f"the imports have started threads, {threads - 1} of them"


def _start_workers(link: socket.socket, launcher: int) -> dict[str, str]:
    """Start the workers of one batch. Returns in each worker, with its environment."""
    helper = os.getpid()
    starting, started = os.pipe()
    while True:
        request, files = _receive(link)
        if "environ" not in request:
            # The read returns once each worker has closed its end.
            os.close(started)
            os.read(starting, 1)
            os._exit(0)
        try:
            pid = os.fork()
        except OSError as error:
            answer = {"errno": error.errno}
        else:
            if pid == 0:
                os.setsid()
                for number, file in enumerate(files, start=1):
                    os.dup2(file, number)
                link.close()
                for file in (*files, starting, started):
                    os.close(file)
                _await_launcher(helper, launcher)
                return dict(request["environ"])
            answer = {"pid": pid}
        for file in files:
            os.close(file)
        _send(link, answer)


def _await_launcher(helper: int, launcher: int) -> None:
    """Wait until the launcher is the parent of this worker. From then on, the worker ends with the launcher."""
    while (parent := os.getppid()) == helper:
        time.sleep(_INTERVAL_S)
    # The kernel watches the parent of the moment of this call. So call it when the launcher is the parent.
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if parent != launcher or os.getppid() != launcher:
        os._exit(1)


def _become_worker(environ: dict[str, str], command: bytes) -> None:
    """Remove the traces of the starter from a forked worker."""
    show(command, _environ_bytes(environ))
    os.environ.clear()
    os.environ.update(environ)
    # os.fork() does not update the main thread's id.
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._set_native_id()
    # The starter's __main__ is frozen (gc.freeze). At exit, Python would not see that the program's globals are
    # garbage, and files among them would lose unwritten data.
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
    # Python's random seeds itself after a fork. These generators do not.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _exec_worker(environ: dict[str, str], command: list[str]) -> None:
    # Like subprocess: Python ignores these signals, and its child processes must not.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(command[0], command, environ)


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next request and its files. Ends this process if the launcher has ended."""
    text, files = b"", list[int]()
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(link, _REQUEST_BYTES, 2)
        if not part:
            os._exit(0)
        text += part
        files += more
    return json.loads(text), files


def _send(link: socket.socket, answer: object) -> None:
    try:
        link.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        # The launcher has ended.
        os._exit(0)


# ---- The two kinds of starter ----------------------------------------------------------------------------------------


def _fork_workers() -> None:
    """Act as the starter whose workers run the program of this process. Returns in each of them."""
    settings = json.loads(os.environ.pop(VARIABLE))
    command = Path("/proc/self/cmdline").read_bytes()
    if settings["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = settings["pythonpath"]
    folder = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    link = socket.socket(fileno=settings["link"])
    _import_users_sitecustomize()
    reason = _preload(settings["preload"], settings["program"])
    _become_worker(_serve(link, settings["launcher"], reason), command)


def _import_users_sitecustomize() -> None:
    """Import the module that Python would have imported instead of this one."""
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise


def _exec_workers() -> None:
    """Act as the starter whose workers run the program that the launcher names."""
    settings = json.loads(sys.argv[1])
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    link = socket.socket(fileno=settings["link"])
    _exec_worker(_serve(link, settings["launcher"], None), settings["command"])


if __name__ == "sitecustomize":
    try:
        _fork_workers()
    except BaseException as error:
        # Without this exit, Python would go on to the program.
        sys.stderr.write(f"torch_ucx_rpc run: the process that starts workers fails: {error!r}\n")
        sys.stderr.flush()
        os._exit(1)
    if "sitecustomize" not in sys.modules:
        # The error that Python expects where there is no such module.
        raise ImportError("there is no sitecustomize", name="sitecustomize")
elif __name__ == "__main__":
    _exec_workers()
