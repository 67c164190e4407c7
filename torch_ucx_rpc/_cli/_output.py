"""What the workers of ``run`` write: passed on line by line with the worker's name in front, or into files."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import selectors
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

_TRACEBACK = b"Traceback (most recent call last):"

# As torch's C++ begins them.
_LOG_LINE = re.compile(r"\[[IWE]\d{4} ")

# Lines of a worker's stderr that are kept for the report of its end, and how many of them are shown where there is no
# traceback among them.
_KEPT_LINES = 200
_SHOWN_LINES = 20

_READ_BYTES = 65_536


class Stream:
    """One of the two outputs of a worker."""

    def __init__(self, target: BinaryIO, prefix: bytes) -> None:
        self._target = target
        self._prefix = prefix
        self._unfinished = b""
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        # By time.monotonic.
        self.last_traceback = float("-inf")

    def take(self, data: bytes) -> None:
        # Progress bars end their lines by a carriage return.
        lines = (self._unfinished + data).splitlines(keepends=True)
        self._unfinished = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        for line in lines:
            self._write(line)
        self._target.flush()

    def finish(self) -> None:
        if self._unfinished:
            self._write(self._unfinished + b"\n")
            self._unfinished = b""
        self._target.flush()

    def _write(self, line: bytes) -> None:
        if line.startswith(_TRACEBACK):
            self.last_traceback = time.monotonic()
        self.last_lines.append(line.rstrip(b"\r\n"))
        # A line in one piece, since others write there too.
        self._target.write(self._prefix + line)


class WorkerOutput:
    """Reads what workers write to named pipes, on a thread of its own, until ``close()``.

    Pipes and not files that are followed: what a long job writes is kept nowhere unless that is asked for, and a worker
    cannot be faster than whoever reads.

    Args:
        directory: for a file each of every worker's stdout and stderr; None for this process's own, with prefixes.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._resources = contextlib.ExitStack()
        self._pipes = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="torch_ucx_rpc-run-")))
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._streams: dict[tuple[str, str], Stream] = {}
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def path(self, worker: str, kind: str) -> str:
        """Where this worker is to write its ``"stdout"`` or ``"stderr"``; for all workers before `start`."""
        pipe = self._pipes / f"{worker}.{kind}"
        os.mkfifo(pipe, 0o600)
        if self._directory is None:
            target: BinaryIO = getattr(sys, kind).buffer
            prefix = f"[{worker}] ".encode()
        else:
            target = self._resources.enter_context((self._directory / f"{worker}.{kind}").open("wb"))
            prefix = b""
        stream = self._streams[worker, kind] = Stream(target, prefix)
        # Opened for writing as well: there is no end before the first writer has come, nor between two.
        end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._resources.callback(os.close, end)
        self._selector.register(end, selectors.EVENT_READ, stream)
        return str(pipe)

    def error_file(self, worker: str) -> str:
        """For what the program may report by ``torch.distributed.elastic.multiprocessing.errors.record``."""
        return str(self._pipes / f"{worker}.error.json")

    def start(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="torch_ucx_rpc-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left, of workers that have ended."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        for stream in self._streams.values():
            stream.finish()
        self._resources.close()

    def last_traceback(self, worker: str) -> float:
        """When its last traceback began to arrive, by time.monotonic; minus infinity if there was none."""
        return self._streams[worker, "stderr"].last_traceback

    def last_words(self, worker: str) -> str:
        """The end of its stderr, from a traceback on if there is one."""
        lines = [line.decode(errors="replace") for line in self._streams[worker, "stderr"].last_lines]
        # C++ code may have had its say at the end of the process.
        while lines and _LOG_LINE.match(lines[-1]):
            lines.pop()
        tracebacks = [index for index, line in enumerate(lines) if line.encode().startswith(_TRACEBACK)]
        # From the first: exceptions that were raised while another was handled come after each other.
        return "\n".join(lines[tracebacks[0] :] if tracebacks else lines[-_SHOWN_LINES:])

    def _follow(self) -> None:
        while not self._is_over.is_set():
            self._pass_on(timeout=0.1)
        while self._pass_on(timeout=0):
            pass

    def _pass_on(self, timeout: float) -> bool:
        ready = self._selector.select(timeout)
        for key, _ in ready:
            key.data.take(os.read(key.fd, _READ_BYTES))
        return bool(ready)
