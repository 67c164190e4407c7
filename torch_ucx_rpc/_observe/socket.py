"""Statistics of a running job for another program: ``python -m torch_ucx_rpc top``.

Each worker listens on a Unix socket with a name in Linux's abstract namespace, ``torch_ucx_rpc/<pid>/<random>``. Such a
socket needs no folder, vanishes with its process, can be found in ``/proc/net/unix``, and cannot be reached from other
hosts. The kernel identifies the user of a connection: the worker answers only its own user and root, and these ask no
other user's worker, except root.

A question is a line of JSON, an answer is one document of JSON, and neither side unpickles anything::

    []           statistics of this worker
    [3, 4, ...]  statistics of these workers on other hosts, which this worker asks by RPC

The answer is ``{"3": statistics, "4": "why there are none", ...}``, by rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed.rpc as rpc

from torch_ucx_rpc._bootstrap.forks import close_in_children

if TYPE_CHECKING:
    from torch_ucx_rpc._observe.statistics import Statistics

_logger = logging.getLogger(__name__)

_PREFIX = "torch_ucx_rpc"
# Limit for the answers of other workers, all together.
_ANSWER_S = 5.0
# Limit for each step of a client: its question fits into one packet, and it reads the answer at once.
_CLIENT_S = 10.0
# Limits in bytes.
_LONGEST_QUESTION, _LONGEST_ANSWER = 1 << 20, 1 << 28
# At the end of the agent, limit for an answer under way.
_FAREWELL_S = 0.5
# The pause when this process can open no more files.
_NO_FILE_S = 1.0


class Observed:
    """Answers observers of this worker, on a thread of its own, until `close`.

    Raises OSError if the socket cannot be made.
    """

    def __init__(self, snapshot: Callable[[], Statistics]) -> None:
        self._snapshot = snapshot
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(f"{os.getpid()}/{os.urandom(4).hex()}"))
            self._socket.listen(16)
        except OSError:
            self._socket.close()
            raise
        close_in_children(self._socket)
        # A daemon thread does not hold up the end of a program without shutdown.
        self._thread = threading.Thread(target=self._serve, name="torch_ucx_rpc-observed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        # Wakes the thread; closing alone would not.
        self._socket.shutdown(socket.SHUT_RDWR)
        # A client that does not read may block the thread.
        self._thread.join(_FAREWELL_S)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _logger.debug("the connection of an observer failed: %s", error)
                time.sleep(_NO_FILE_S)
                continue
            with connection:
                try:
                    connection.settimeout(_CLIENT_S)
                    if _uid(connection) in (os.geteuid(), 0):
                        connection.sendall(json.dumps(self._answer(_read_line(connection))).encode())
                # A bad or vanishing client must not harm others, so this catches every exception of JSON and torch.
                except Exception as error:
                    _logger.debug("an observer got no answer: %s", error)
                # Closing is not enough: the observer reads to the end, and a forked child may have the connection too.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, question: bytes) -> dict[str, Any]:
        ranks = json.loads(question)
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError(f"{question!r} is not a list of ranks")
        if not ranks:
            own = self._snapshot()
            return {str(own.rank): own.to_values()}
        return _ask_by_rpc(ranks)


def _ask_by_rpc(ranks: list[int]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    asked = {}
    for rank in ranks:
        try:
            asked[rank] = rpc.rpc_async(rank, own_statistics, timeout=_ANSWER_S)
        # RPC has ended, or the worker is unknown or gone.
        except RuntimeError as error:
            answers[str(rank)] = str(error)
    for rank, future in asked.items():
        try:
            answers[str(rank)] = json.loads(future.wait())
        except RuntimeError as error:
            answers[str(rank)] = str(error)
    return answers


def own_statistics() -> str:
    """For RPC: return this worker's statistics as text, so that the caller unpickles only a str."""
    # Load it on demand: each worker loads this module, but observers ask few workers.
    from torch_ucx_rpc._observe.statistics import statistics

    return json.dumps(statistics().to_values())


class Found(NamedTuple):
    """A worker on this host that can be asked."""

    pid: int
    name: str

    def ask(self, ranks: Iterable[int] = ()) -> dict[int, Statistics | str]:
        """Ask for statistics of this worker, or of the workers ``ranks``. Returns them by rank; a str is the reason for
        their absence.

        Raises OSError if the worker does not answer, and ValueError for a malformed answer.
        """
        from torch_ucx_rpc._observe.statistics import Statistics

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CLIENT_S)
            connection.connect(_address(self.name))
            if os.geteuid() not in (_uid(connection), 0):
                raise OSError("it belongs to another user")
            connection.sendall(json.dumps(list(ranks)).encode() + b"\n")
            text = bytearray()
            while (packet := connection.recv(1 << 16)) and len(text) < _LONGEST_ANSWER:
                text += packet
        if not text:
            raise OSError("the worker does not answer: it is about to end")
        answers = json.loads(text) if len(text) < _LONGEST_ANSWER else None
        if not isinstance(answers, dict):
            raise ValueError("that is not the answer of a worker")
        return {
            int(rank): values if isinstance(values, str) else Statistics.from_values(values)
            for rank, values in answers.items()
        }


def workers_of_this_host() -> list[Found]:
    """All workers in this network namespace, of every job, sorted by pid."""
    table = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    # Connections have the same name. The listening socket has the flag __SO_ACCEPTCON in the fourth column.
    names = re.findall(rf"^(?:\S+ ){{3}}00010000 .* @{_PREFIX}/((\d+)/\w+)$", table, re.MULTILINE)
    return sorted((Found(int(pid), name) for name, pid in names), key=lambda found: found.pid)


def _address(name: str) -> str:
    return f"\0{_PREFIX}/{name}"


def _uid(connection: socket.socket) -> int:
    """User id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _read_line(connection: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n") and len(text) < _LONGEST_QUESTION:
        packet = connection.recv(1 << 16)
        if not packet:
            break
        text += packet
    return text
