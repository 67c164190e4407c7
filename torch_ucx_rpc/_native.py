"""Loads UCX, then the extension ``_C``. Failures are ImportErrors that name the cause and the cure.

Only a libucx wheel whose libraries cannot be loaded raises OSError instead.

The order is torch, UCX, ``_C``. The extension has no search paths. It names its libraries (``libc10.so``,
``libucp.so.0``), and the loader finds the ones that the process has loaded already. So the extension uses a libucp that
another package, such as Open MPI, has loaded before. Two copies of libucp would abort the process. UCX consists of
several libraries. If only some of them are loaded, this module loads the others from the same folder.

``TORCH_UCX_RPC_UCX`` chooses the source of UCX: ``wheel`` is the package libucx, ``system`` is the UCX of conda or of
the operating system. By default it is the wheel if there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

SONAME = "libucp.so.0"

_PACKAGE = Path(__file__).parent
# The headers of torch at the build, written by tools/torch_headers.py.
_HEADERS = _PACKAGE / "_torch_headers.txt"
_INSTALL_UCX = "pip install libucx-cu12 (libucx-cu13 beside a CUDA 13 torch), or conda install -c conda-forge ucx"
_BUILD = "run `make build` in the source tree, or `pip install --no-build-isolation <source tree>`"


class Ucx(NamedTuple):
    """The libucp of this process."""

    version: tuple[int, int, int]

    @property
    def path(self) -> str:
        # Look this up on demand: in a process with torch the list of mapped files is long.
        return path_in_maps(_maps()) or SONAME

    def __str__(self) -> str:
        return f"UCX {'.'.join(map(str, self.version))} ({self.path})"


# Signals for which UCX sets handlers when it is loaded, by the variable with which a user asks for them: SIGHUP for
# debug output and, before UCX 1.20, the signals of crashes for a backtrace.
_TAKEN_SIGNALS = {
    "UCX_DEBUG_SIGNO": [signal.SIGHUP],
    "UCX_HANDLE_ERRORS": [signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE],
}
# At least the size of any C library's struct sigaction.
_SIGACTION_BYTES = 256

# When it is loaded, UCX overwrites the first bytes of these functions of the C library, to learn of released memory. It
# locks one function after the other, and waits each time for threads in the middle of those bytes. The wait is 50 ms
# since UCX 1.21, and was 5 ms before (openucx/ucx#11112). That is 0.40 s of the 0.41 s that loading takes.
_PATCHED_BY_UCX = ("mmap", "munmap", "mremap", "shmat", "shmdt", "sbrk", "brk", "madvise")
# UCX overwrites fewer bytes of each function.
_PATCHED_BYTES = 64
_PATCHING_WAIT = "UCX_MEM_BISTRO_GRACE_DURATION"
# The wait if no thread can be in those bytes. Not zero: a thread of a library may have been woken since the check, and
# passes these bytes within nanoseconds. Not longer: UCX spins during each of the eight waits, and workers that start
# together share cores.
_SHORT_PATCHING_WAIT = "10us"


def path_in_maps(maps: str, library: str = "libucp") -> str | None:
    """The file of a mapped library, from the text of ``/proc/self/maps``; None if it is not mapped."""
    for line in maps.splitlines():
        if library in line:
            found = re.match(rf"(?:\S+\s+){{5}}(/.*/{library}\.so[.\d]*)", line)
            if found is not None:
                return found[1]
    return None


def _maps() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")


def loaded_ucx() -> Ucx | None:
    """The libucp that is loaded in the process, by any package; None if there is none."""
    try:
        # NOLOAD: finds a loaded library by its soname, as the extension will.
        library = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*map(ctypes.byref, numbers))
    major, minor, release = (number.value for number in numbers)
    return Ucx((major, minor, release))


def complete_ucx() -> Ucx | None:
    """Load the libucp that belongs to loaded parts of UCX; None if no part is loaded."""
    try:
        ctypes.CDLL("libucs.so.0", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    part = path_in_maps(_maps(), "libucs") or "libucs.so.0"
    try:
        ctypes.CDLL(str(Path(part).with_name(SONAME)))
    except OSError:
        raise _error(
            f"another package has loaded a part of UCX ({part}) that has no {SONAME} beside it, and a process can have "
            f"one UCX: import torch_ucx_rpc before that package."
        ) from None
    return loaded_ucx()


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that the block has changed, except those that the user asked UCX to take.

    Otherwise a worker would not end with its terminal. Handlers that the program has set with ``signal`` or
    ``faulthandler`` would be lost. Python's ``signal`` cannot do this: it does not see handlers in C.
    """
    sigaction = ctypes.CDLL(None).sigaction
    taken = [number for variable, numbers in _TAKEN_SIGNALS.items() if variable not in os.environ for number in numbers]
    before = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in taken}
    for number, action in before.items():
        sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in before.items():
            sigaction(number, action, None)


def may_be_patched_at_once(tasks: Path = Path("/proc/self/task")) -> bool:
    """True if no other thread is in, or about to enter, the functions that UCX overwrites.

    That is certain if this is the only thread of Python, and all other threads sleep in system calls outside those
    functions. The threads of a BLAS or of OpenMP do so while they wait for work. False if unknown.
    """
    if len(sys._current_frames()) != 1:
        return False
    library = ctypes.CDLL(None)
    functions = [getattr(library, name, None) for name in _PATCHED_BY_UCX]
    begins = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions if function is not None]
    this = str(threading.get_native_id())
    try:
        # The last number is the program counter. A running thread has none.
        others = [task for task in tasks.iterdir() if task.name != this]
        where = [(task / "syscall").read_text(encoding="ascii").split()[-1] for task in others]
    except OSError:
        return False
    addresses = [int(address, 16) if address.startswith("0x") else None for address in where]
    return all(
        address is not None and not any(begin <= address < begin + _PATCHED_BYTES for begin in begins)
        for address in addresses
    )


@contextlib.contextmanager
def short_patching_wait() -> Iterator[None]:
    """Shorten UCX's wait for threads in the functions that it overwrites.

    The user's own setting stays. UCX takes this setting from the environment only, and reads it when it is loaded.
    Processes that are started later do not get it.
    """
    if _PATCHING_WAIT in os.environ or not may_be_patched_at_once():
        yield
        return
    os.environ[_PATCHING_WAIT] = _SHORT_PATCHING_WAIT
    try:
        yield
    finally:
        os.environ.pop(_PATCHING_WAIT, None)


def sources(choice: str) -> tuple[str, ...]:
    """Sources of UCX, in the order to try them, for a value of TORCH_UCX_RPC_UCX."""
    if choice not in ("", "wheel", "system"):
        raise _error(f"TORCH_UCX_RPC_UCX={choice} means nothing: set it to wheel or system, or leave it unset.")
    return (choice,) if choice else ("wheel", "system")


def load_wheel() -> bool:
    """Load UCX from the libucx wheel; False if it is not installed."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return False  # an uninstalled package may leave an empty folder behind
    # The module behind `libucx.load_library`. Importing the package itself takes longer than loading UCX, since it
    # looks for its version.
    loading = importlib.machinery.SourceFileLoader("_libucx_load", str(Path(spec.origin).with_name("load.py")))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(loading.name, loading, origin=loading.path))
    module.__file__ = loading.path
    try:
        loading.exec_module(module)
        load_library = module.load_library
    except (OSError, AttributeError):
        # Another version of libucx keeps `load_library` elsewhere.
        load_library = getattr(importlib.import_module("libucx"), "load_library", None)
    if load_library is None:
        return False
    load_library()
    return True


def load_system() -> bool:
    """Load UCX from this Python's prefix (conda) or from the operating system; False if there is none."""
    for library in (str(Path(sys.prefix) / "lib" / SONAME), SONAME):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return False


def is_from_wheel(path: str) -> bool:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return False
    return Path(path).resolve().is_relative_to(Path(spec.origin).resolve().parent)


def load_ucx(choice: str, built_for: str) -> Ucx:
    """Make sure that the process has one libucp, new enough for an extension built with UCX ``built_for`` ("1.22")."""
    wanted = sources(choice)
    before = loaded_ucx() or complete_ucx()
    if before is not None:
        if choice and is_from_wheel(before.path) != (choice == "wheel"):
            raise _error(
                f"{before} is in this process already and is not the one that TORCH_UCX_RPC_UCX={choice} asks for: "
                f"import torch_ucx_rpc before the package that loads it, or unset TORCH_UCX_RPC_UCX."
            )
        check_ucx_version(before, built_for, was_there_before=True)
        return before
    load = {"wheel": load_wheel, "system": load_system}
    with signal_handlers_kept(), short_patching_wait():
        is_loaded = any(load[source]() for source in wanted)
    if not is_loaded:
        where = {"": "", "wheel": " in a libucx wheel", "system": " in conda's or the system's libraries"}[choice]
        raise _error(f"there is no UCX ({SONAME}){where}: {_INSTALL_UCX}.")
    found = loaded_ucx()
    if found is None:
        raise _error(f"the package libucx is incomplete, it brings no {SONAME}: reinstall it, {_INSTALL_UCX}.")
    check_ucx_version(found, built_for, was_there_before=False)
    return found


def check_ucx_version(found: Ucx, built_for: str, *, was_there_before: bool) -> None:
    """Refuse a UCX older than the headers of the build: UCX is compatible in the other direction only."""
    if found.version[:2] >= tuple(int(number) for number in built_for.split(".")):
        return
    reason = f"torch_ucx_rpc was built with UCX {built_for} and cannot run with the older {found}"
    if was_there_before:
        raise _error(
            f"{reason}, which another package loaded before, and a process can have only one UCX: import "
            f"torch_ucx_rpc before that package (MPI, for one), or have it find a newer UCX, by "
            f"LD_LIBRARY_PATH={_newer_ucx()}."
        )
    raise _error(f"{reason}: install a newer one, {_INSTALL_UCX}, or build torch_ucx_rpc again: {_BUILD}.")


def _newer_ucx() -> str:
    """The folder with the libraries of the libucx wheel, or a placeholder if there is no wheel."""
    spec = importlib.util.find_spec("libucx")
    return "<its folder>" if spec is None or spec.origin is None else str(Path(spec.origin).parent / "lib")


def check_torch_version(built_for: str, running: str, listing: Path = _HEADERS, include: Path | None = None) -> None:
    """Refuse another torch than that of the build, except a patch release with the same C++ interface.

    The CPU and CUDA builds of one release are interchangeable. Two patch releases are interchangeable if every header
    that `listing` names is the same in the folder `include` (default: torch's).
    """
    built, here = without_build_label(built_for), without_build_label(running)
    if built == here:
        return
    difference = ""
    if minor_release(here) is not None and minor_release(here) == minor_release(built) and listing.exists():
        changed = changed_headers(listing, include or Path(torch.__file__).parent / "include")
        if not changed:
            return
        difference = f", whose header {changed[0]} differs"
    wheel = (
        f"install the wheel for it (pip install torch_ucx_rpc 'torch=={minor_release(here)}.*') from the index that "
        f"this one is from, "
    )
    raise _error(
        f"torch_ucx_rpc was built for torch {built_for} and this is torch {running}{difference}: "
        f"{wheel if minor_release(here) not in (None, minor_release(built)) else ''}build it again "
        f"(`pip install --no-build-isolation --no-deps --force-reinstall <source tree>`), "
        f"or install torch {built_for}."
    )


def without_build_label(version: str) -> str:
    # Only these labels count: in a torch built from source, the text after the + is a commit.
    return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", version)


def minor_release(release: str) -> str | None:
    """The part 2.13 of the final release 2.13.1; None for nightly builds and the like, which change from day to day."""
    found = re.fullmatch(r"(\d+\.\d+)\.\d+", release)
    return None if found is None else found[1]


def changed_headers(listing: Path, include: Path) -> list[str]:
    """Return the headers that differ in the folder `include`, or are missing; the listing has lines of sha256sum."""
    entries = [line.split("  ", 1) for line in listing.read_text(encoding="utf-8").splitlines()]
    return [name for digest, name in entries if _digest(include / name) != digest]


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def check_built(folder: Path) -> None:
    """Raise ImportError if the package's folder has no extension for this Python."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    if (folder / f"_C{suffix}").exists() and (folder / "_build_info.py").exists():
        return
    others = sorted(file.name for file in folder.glob("_C.*.so"))
    if others and f"_C{suffix}" not in others:
        raise _error(f"the extension in {folder} is {others[0]}, and this Python needs _C{suffix}: {_BUILD}.")
    raise _error(f"the extension has not been built in {folder}: {_BUILD}.")


def _error(text: str) -> ImportError:
    return ImportError(text, name="torch_ucx_rpc")


def _prepare() -> None:
    check_built(_PACKAGE)
    from torch_ucx_rpc._build_info import BUILT_FOR_TORCH, BUILT_FOR_UCX

    check_torch_version(BUILT_FOR_TORCH, torch.__version__)
    if not torch.distributed.rpc.is_available():
        raise _error(f"torch {torch.__version__} was built without RPC: install one with it (pip install torch).")
    load_ucx(os.environ.get("TORCH_UCX_RPC_UCX", ""), BUILT_FOR_UCX)


_prepare()

try:
    from torch_ucx_rpc import _C as _C
except ImportError as error:
    raise _error(f"the extension cannot be loaded ({error}): {_BUILD}.") from error
