"""What the site has set, or does not allow, that RPC cannot work with, or not well: found before workers meet.

Here is what UCX does not tell by itself. Of variables that it does not know, of devices and transports that a machine
does not have, and of values that make no sense it warns on stderr.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

_logger = logging.getLogger(__name__)

# Names in UCX_TLS that take no messages to another process: loopback, and what only copies once two are connected.
_NO_CARRIERS = re.compile(r"self|cma|knem|gdr_copy|gdrcopy|cuda(_copy|_ipc)?|rocm(_copy|_ipc)?|ze(_copy|_ipc)?")
_SHARED_MEMORY = {"sm", "shm", "mm", "sysv", "posix", "xpmem"}
_NO = {"n", "no", "off", "0", "false"}

# What an agent opens before it calls anybody, 27 files, with room for the Store and what Python imports late.
_FILES_OF_AN_AGENT = 48
# To watch the process of another worker on this host, and for a connection to it over TCP.
_FILES_OF_A_PEER = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    problem: str
    cure: str
    # Whether the package cannot be used at all.
    is_fatal: bool = False


def check(world_size: int | None) -> None:
    """Raise RuntimeError for what cannot work in a job of so many workers; warn, once a process, of what works badly.

    ``None`` is a group without a size.
    """
    found = list(of_files(world_size or 1))
    # Alone, a worker calls nobody but itself, and for that UCX is not needed.
    if world_size != 1:
        found += of_settings(os.environ)
    for conflict in found:
        if conflict.is_fatal:
            raise RuntimeError(f"{conflict.problem}: {conflict.cure}")
        if conflict not in _told:
            _told.add(conflict)
            _logger.warning("%s: %s", conflict.problem, conflict.cure)


_told: set[Problem] = set()


def of_settings(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Values of ``UCX_*`` variables that UCX takes without a word."""
    names = _names(environ.get("UCX_TLS", "all"))
    if names and all(_NO_CARRIERS.fullmatch(name) for name in names):
        yield Problem(
            f"UCX_TLS={environ['UCX_TLS']} leaves no transport by which messages reach another worker",
            "add sm for workers of one host, and tcp or rc for those of several, or unset it",
            is_fatal=True,
        )
    elif environ.get("UCX_MM_ERROR_HANDLING", "").lower() in _NO:
        has_no_other_way = names is not None and all(
            name in _SHARED_MEMORY or _NO_CARRIERS.fullmatch(name) for name in names
        )
        yield Problem(
            "with UCX_MM_ERROR_HANDLING=n workers of one host cannot use shared memory"
            + (f", which is all that UCX_TLS={environ['UCX_TLS']} allows" if has_no_other_way else " and take TCP"),
            "unset it",
            is_fatal=has_no_other_way,
        )
    stops = re.search("freeze|debug", environ.get("UCX_HANDLE_ERRORS", ""))
    if stops:
        yield Problem(
            f"with UCX_HANDLE_ERRORS={environ['UCX_HANDLE_ERRORS']} a worker that crashes stops and does not end, and "
            f"calls to it wait for their timeouts",
            "set it to bt or none, unless somebody waits for crashes with a debugger",
        )
    if environ.get("UCX_TCP_CONN_NB", "").lower() in _NO:
        yield Problem(
            "with UCX_TCP_CONN_NB=n a call to a host that is down holds up all other calls of this worker, for minutes",
            "unset it",
        )


def of_files(world_size: int) -> Iterator[Problem]:
    """Too few files for this process to open, for a job of so many workers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        is_open = len(list(Path("/proc/self/fd").iterdir()))
    # There is none left even for that.
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


def _names(transports: str) -> list[str] | None:
    """What is listed in UCX_TLS; None for a list that names what it excludes, and for all."""
    listed = [name.strip().lstrip("\\").partition(":")[0] for name in transports.split(",") if name.strip()]
    return None if transports.startswith("^") or "all" in listed else listed
