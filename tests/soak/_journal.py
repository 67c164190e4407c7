"""The journal of a worker, in files that outlive it however it ends.

Each process has two files, named by its rank and generation. ``3.2.calls``, an array of `ENTRY`, belongs to the third
process that had rank 3. ``3.2.events`` has all other notes, such as failed calls and memberships, one JSON object a
line. Times come from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Step(enum.IntEnum):
    """The steps of a call. A call of the kind "nested" consists of several, and each is executed once."""

    BEGUN = 0
    EXECUTED = 1
    ANSWERED = 2
    FAILED = 3


ENTRY = np.dtype([("call", "<u8"), ("time", "<f8"), ("bytes", "<u4"), ("step", "u1"), ("kind", "u1"), ("pad", "<u2")])
_ENTRY = struct.Struct("<QdIBBxx")

# An entry has the index of its kind.
KINDS = (
    "rpc_sync",
    "rpc_async",
    "remote",
    "async_execution",
    "builtin",
    "script",
    "nested",
    "rref",
    "autograd",
    "exception",
    "timeout",
    "callback",
    "swapped",
    "service",
    "name",
    "push",
)

# Kinds whose executions no journal has: only callees of Python functions note executions. A service may be called again
# when a replica is lost. A server counts pushes itself.
UNCOUNTED = ("builtin", "script", "service", "name", "push")

_RANK_SHIFT, _GENERATION_SHIFT = 56, 40


class Journal:
    """The journal of this process. Each entry is written by one ``write``, so it is complete or absent."""

    def __init__(self, directory: Path, rank: int, generation: int) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._calls = os.open(directory / f"{rank}.{generation}.calls", flags, 0o600)
        self._events = os.open(directory / f"{rank}.{generation}.events", flags, 0o600)
        first = (rank << _RANK_SHIFT) | (generation << _GENERATION_SHIFT)
        self._numbers = itertools.count(first)

    def new_call(self) -> int:
        """Return a number that no other call of the run has."""
        return next(self._numbers)

    def enter(self, call: int, step: Step, kind: str, size: int = 0) -> None:
        os.write(self._calls, _ENTRY.pack(call, time.monotonic(), min(size, 2**32 - 1), step, KINDS.index(kind)))

    def note(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **values})
        os.write(self._events, f"{line}\n".encode())


def read_calls(directory: Path) -> np.ndarray:
    """Return all entries of all processes."""
    files = sorted(directory.glob("*.calls"))
    return np.concatenate([np.empty(0, ENTRY), *(np.fromfile(file, ENTRY) for file in files)])


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Return all events of all processes, each with the ``rank`` and ``generation`` of its writer."""
    for file in sorted(directory.glob("*.events")):
        rank, generation, _ = file.name.split(".")
        for line in file.read_text().splitlines():
            yield {"rank": int(rank), "generation": int(generation), **json.loads(line)}


def writer_of(call: int) -> tuple[int, int]:
    """Return the rank and the generation of the caller's process."""
    return call >> _RANK_SHIFT, (call >> _GENERATION_SHIFT) & 0xFFFF
