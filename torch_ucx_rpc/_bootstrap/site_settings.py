"""Checks settings and limits of the site before workers meet: with some of them RPC fails or works badly.

This module checks only settings that UCX accepts silently. UCX itself warns on stderr of unknown variables, of devices
and transports that the machine does not have, and of invalid values.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch_ucx_rpc.errors import JoinFailed

_logger = logging.getLogger(__name__)

# Names in UCX_TLS of transports that carry no messages to another process: loopback, and those that only copy memory.
_NO_CARRIERS = {"self", "cma", "knem", "gdr_copy", "gdrcopy"} | {
    gpu + way for gpu in ("cuda", "rocm", "ze") for way in ("", "_copy", "_ipc")
}
_SHARED_MEMORY = {"sm", "shm", "mm", "sysv", "posix", "xpmem"}
_NO = {"n", "no", "off", "0", "false"}

KEEP_NOFILE = "TORCH_UCX_RPC_KEEP_NOFILE"

# An agent opens 36 files before its first call. The rest is room for the Store and for late imports.
_FILES_OF_AN_AGENT = 48
# One file watches the process of a peer on this host, and one is a TCP connection to it.
_FILES_OF_A_PEER = 2


class Problem(NamedTuple):
    """A fault, and its cure."""

    problem: str
    cure: str
    # True if the package cannot be used at all.
    is_fatal: bool = False


def check(world_size: int | None) -> None:
    """Raise JoinFailed for settings that cannot work; warn, once in a process, of settings that work badly.

    Args:
        world_size: number of workers; None for a group without a size.
    """
    found = list(of_files(world_size or 1))
    # A single worker calls only itself, which does not need UCX.
    if world_size != 1:
        found += of_settings(os.environ)
    for conflict in found:
        if conflict.is_fatal:
            raise JoinFailed(f"{conflict.problem}: {conflict.cure}")
        if conflict not in _told:
            _told.add(conflict)
            _logger.warning("%s: %s", conflict.problem, conflict.cure)


_told: set[Problem] = set()


def keeps_limit_of_files() -> bool:
    """Tell whether the user wants to keep the soft limit of open files."""
    return os.environ.get(KEEP_NOFILE) == "1"


def raise_limit_of_files() -> None:
    """Raise the soft limit of open files to the hard one, unless TORCH_UCX_RPC_KEEP_NOFILE=1.

    The soft limit is often low for the sake of select(), which this package and UCX do not use. Forked children may use
    it, so they get the old limit back.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == most or keeps_limit_of_files():
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.register_at_fork(after_in_child=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most)))
    _logger.info("this process may open %d files now instead of %d (%s=1 prevents that)", most, limit, KEEP_NOFILE)


def of_settings(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Problems with values of ``UCX_*`` variables that UCX accepts silently."""
    names = _names(environ.get("UCX_TLS", "all"))
    if names and names <= _NO_CARRIERS:
        yield Problem(
            f"UCX_TLS={environ['UCX_TLS']} leaves no transport by which messages reach another worker",
            "add sm for workers of one host, and tcp or rc for those of several, or unset it",
            is_fatal=True,
        )
    elif environ.get("UCX_MM_ERROR_HANDLING", "").lower() in _NO:
        has_no_other_way = names is not None and names <= _NO_CARRIERS | _SHARED_MEMORY
        yield Problem(
            "with UCX_MM_ERROR_HANDLING=n workers of one host cannot use shared memory"
            + (f", which is all that UCX_TLS={environ['UCX_TLS']} allows" if has_no_other_way else " and take TCP"),
            "unset it",
            is_fatal=has_no_other_way,
        )
    if any(stop in environ.get("UCX_HANDLE_ERRORS", "") for stop in ("freeze", "debug")):
        yield Problem(
            f"with UCX_HANDLE_ERRORS={environ['UCX_HANDLE_ERRORS']} a worker that crashes stops instead of ending, and "
            f"calls to it wait for their timeouts",
            "set it to bt or none, unless you wait for crashes with a debugger",
        )
    if environ.get("UCX_TCP_CONN_NB", "").lower() in _NO:
        yield Problem(
            "with UCX_TCP_CONN_NB=n a call to a host that is down holds up all other calls of this worker, for minutes",
            "unset it",
        )


def of_files(world_size: int) -> Iterator[Problem]:
    """Problems with the limit of open files, for a job of ``world_size`` workers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        is_open = len(list(Path("/proc/self/fd").iterdir()))
    # The process cannot even open a file to list them.
    except OSError:
        is_open = limit
    wanted = is_open + _FILES_OF_AN_AGENT + _FILES_OF_A_PEER * (world_size - 1)
    if limit < is_open + _FILES_OF_AN_AGENT:
        yield Problem(
            f"this process may open {limit} files, has {is_open} open, and RPC takes up to {_FILES_OF_AN_AGENT}",
            f"raise the limit of open files, ulimit -n {max(65536, wanted)}",
            is_fatal=True,
        )
    elif limit < wanted:
        yield Problem(
            f"this process may open {limit} files and has {is_open} open, which is not enough to call all of "
            f"{world_size} workers; calls to the last ones are going to fail",
            f"raise the limit of open files, ulimit -n {max(65536, wanted)}",
        )


def _names(transports: str) -> set[str] | None:
    """The transports that UCX_TLS lists; None for a list of exclusions, and for "all"."""
    listed = {name.strip().lstrip("\\").partition(":")[0] for name in transports.split(",") if name.strip()}
    return None if transports.startswith("^") or "all" in listed else listed
